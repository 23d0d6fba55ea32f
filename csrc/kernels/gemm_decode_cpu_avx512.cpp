// The loops of few-row GEMMs for x86-64-v4 (AVX-512 F, BW, CD, DQ, VL): built with
// -march=x86-64-v4.
#include "kernels/gemm_decode_cpu_loops.h"

namespace tpkernels {

extern const DecodeKernels kDecodeKernels_avx512;
const DecodeKernels kDecodeKernels_avx512 = make_decode_kernels("avx512");

}  // namespace tpkernels
