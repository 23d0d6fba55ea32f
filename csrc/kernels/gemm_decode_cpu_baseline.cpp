// The loops of few-row GEMMs for any processor of the target architecture.
#include "kernels/gemm_decode_cpu_loops.h"

namespace tpkernels {

extern const DecodeKernels kDecodeKernels_baseline;
const DecodeKernels kDecodeKernels_baseline = make_decode_kernels("baseline");

}  // namespace tpkernels
