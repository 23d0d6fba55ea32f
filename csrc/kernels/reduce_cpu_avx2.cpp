// The reduction loops for x86-64-v3 (AVX2, FMA): built with -march=x86-64-v3.
#include "kernels/reduce_cpu_loops.h"

namespace tpkernels {

extern const ReduceKernels kReduceKernels_avx2;
const ReduceKernels kReduceKernels_avx2 = make_reduce_kernels("avx2");

}  // namespace tpkernels
