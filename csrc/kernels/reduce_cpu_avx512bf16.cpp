// The reduction loops for x86-64-v4 with AVX-512 BF16: built with -march=x86-64-v4 -mavx512bf16.
#include "kernels/reduce_cpu_loops.h"

namespace tpkernels {

extern const ReduceKernels kReduceKernels_avx512bf16;
const ReduceKernels kReduceKernels_avx512bf16 = make_reduce_kernels("avx512bf16");

}  // namespace tpkernels
