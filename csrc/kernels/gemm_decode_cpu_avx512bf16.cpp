// The loops of few-row GEMMs for x86-64-v4 with AVX-512 BF16: built with -march=x86-64-v4
// -mavx512bf16.
#include "kernels/gemm_decode_cpu_loops.h"

namespace tpkernels {

extern const DecodeKernels kDecodeKernels_avx512bf16;
const DecodeKernels kDecodeKernels_avx512bf16 = make_decode_kernels("avx512bf16");

}  // namespace tpkernels
