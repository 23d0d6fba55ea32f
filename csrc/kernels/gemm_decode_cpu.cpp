// Choice of instruction set for GEMMs of few rows, once, at the first use.
#include "kernels/gemm_decode_cpu.h"

#include <array>

#include "kernels/cpu_isa.h"

namespace tpkernels {

extern const DecodeKernels kDecodeKernels_baseline;
#if defined(__x86_64__)
extern const DecodeKernels kDecodeKernels_avx2;
extern const DecodeKernels kDecodeKernels_avx512;
extern const DecodeKernels kDecodeKernels_avx512bf16;
#endif

namespace {

using Available = std::array<const DecodeKernels*, kMaxDecodeIsas + 1>;

Available find_available() {
  Available found{};
  size_t count = 0;
#if defined(__x86_64__)
  if (runs_avx512bf16()) found[count++] = &kDecodeKernels_avx512bf16;
  if (runs_avx512()) found[count++] = &kDecodeKernels_avx512;
  if (runs_avx2()) found[count++] = &kDecodeKernels_avx2;
#endif
  found[count] = &kDecodeKernels_baseline;
  return found;
}

}  // namespace

const DecodeKernels* const* decode_kernels_available() {
  static const Available available = find_available();
  return available.data();
}

const DecodeKernels& decode_kernels() { return *decode_kernels_available()[0]; }

}  // namespace tpkernels
