// The epilogue loops for any processor of the target architecture.
#include "kernels/epilogue_cpu_loops.h"

namespace tpkernels {

extern const EpilogueKernels kEpilogueKernels_baseline;
const EpilogueKernels kEpilogueKernels_baseline = make_epilogue_kernels("baseline");

}  // namespace tpkernels
