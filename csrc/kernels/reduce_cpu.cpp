// Choice of instruction set for the reduction loops, once, at the first use.
#include "kernels/reduce_cpu.h"

#include <array>
#include <cstddef>

#include "kernels/cpu_isa.h"

namespace tpkernels {

extern const ReduceKernels kReduceKernels_baseline;
#if defined(__x86_64__)
extern const ReduceKernels kReduceKernels_avx2;
extern const ReduceKernels kReduceKernels_avx512;
extern const ReduceKernels kReduceKernels_avx512bf16;
#endif

namespace {

using Available = std::array<const ReduceKernels*, kMaxReduceIsas + 1>;

Available find_available() {
  Available found{};
  size_t count = 0;
#if defined(__x86_64__)
  if (runs_avx512bf16()) found[count++] = &kReduceKernels_avx512bf16;
  if (runs_avx512()) found[count++] = &kReduceKernels_avx512;
  if (runs_avx2()) found[count++] = &kReduceKernels_avx2;
#endif
  found[count] = &kReduceKernels_baseline;
  return found;
}

}  // namespace

const ReduceKernels* const* reduce_kernels_available() {
  static const Available available = find_available();
  return available.data();
}

const ReduceKernels& reduce_kernels() { return *reduce_kernels_available()[0]; }

}  // namespace tpkernels
