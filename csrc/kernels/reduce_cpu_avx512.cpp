// The reduction loops for x86-64-v4 (AVX-512 F, BW, CD, DQ, VL): built with -march=x86-64-v4.
#include "kernels/reduce_cpu_loops.h"

namespace tpkernels {

extern const ReduceKernels kReduceKernels_avx512;
const ReduceKernels kReduceKernels_avx512 = make_reduce_kernels("avx512");

}  // namespace tpkernels
