// The epilogue loops for x86-64-v4 (AVX-512 F, BW, CD, DQ, VL): built with -march=x86-64-v4.
#include "kernels/epilogue_cpu_loops.h"

namespace tpkernels {

extern const EpilogueKernels kEpilogueKernels_avx512;
const EpilogueKernels kEpilogueKernels_avx512 = make_epilogue_kernels("avx512");

}  // namespace tpkernels
