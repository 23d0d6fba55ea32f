// The loops of few-row GEMMs for x86-64-v3 (AVX2, FMA, F16C): built with -march=x86-64-v3.
#include "kernels/gemm_decode_cpu_loops.h"

namespace tpkernels {

extern const DecodeKernels kDecodeKernels_avx2;
const DecodeKernels kDecodeKernels_avx2 = make_decode_kernels("avx2");

}  // namespace tpkernels
