// The epilogue loops for x86-64-v3 (AVX2, FMA): built with -march=x86-64-v3.
#include "kernels/epilogue_cpu_loops.h"

namespace tpkernels {

extern const EpilogueKernels kEpilogueKernels_avx2;
const EpilogueKernels kEpilogueKernels_avx2 = make_epilogue_kernels("avx2");

}  // namespace tpkernels
