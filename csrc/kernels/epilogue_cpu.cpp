// Choice of instruction set for the epilogue loops, once, at the first use.
#include "kernels/epilogue_cpu.h"

#include <array>

#include "kernels/cpu_isa.h"

namespace tpkernels {

extern const EpilogueKernels kEpilogueKernels_baseline;
#if defined(__x86_64__)
extern const EpilogueKernels kEpilogueKernels_avx2;
extern const EpilogueKernels kEpilogueKernels_avx512;
#endif

namespace {

using Available = std::array<const EpilogueKernels*, kMaxEpilogueIsas + 1>;

Available find_available() {
  Available found{};
  size_t count = 0;
#if defined(__x86_64__)
  if (runs_avx512()) found[count++] = &kEpilogueKernels_avx512;
  if (runs_avx2()) found[count++] = &kEpilogueKernels_avx2;
#endif
  found[count] = &kEpilogueKernels_baseline;
  return found;
}

}  // namespace

const EpilogueKernels* const* epilogue_kernels_available() {
  static const Available available = find_available();
  return available.data();
}

const EpilogueKernels& epilogue_kernels() { return *epilogue_kernels_available()[0]; }

}  // namespace tpkernels
