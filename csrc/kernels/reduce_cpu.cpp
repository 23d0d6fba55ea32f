// Choice of instruction set for the reduction loops, once, at the first use.
#include "kernels/reduce_cpu.h"

#include <array>
#include <cstddef>

namespace tpkernels {

extern const ReduceKernels kReduceKernels_baseline;
#if defined(__x86_64__)
extern const ReduceKernels kReduceKernels_avx2;
extern const ReduceKernels kReduceKernels_avx512;
#endif

namespace {

using Available = std::array<const ReduceKernels*, kMaxReduceIsas + 1>;

Available find_available() {
  Available found{};
  size_t count = 0;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) found[count++] = &kReduceKernels_avx512;
  if (avx2) found[count++] = &kReduceKernels_avx2;
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
