// The reduction loops for any processor of the target architecture.
#include "kernels/reduce_cpu_loops.h"

namespace tpkernels {

extern const ReduceKernels kReduceKernels_baseline;
const ReduceKernels kReduceKernels_baseline = make_reduce_kernels("baseline");

}  // namespace tpkernels
