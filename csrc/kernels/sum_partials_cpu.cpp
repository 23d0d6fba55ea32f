#include "kernels/sum_partials_cpu.h"

#include <algorithm>
#include <cstring>

// One body, compiled for each instruction set; the loader takes the best that the processor runs.
// The results do not depend on which: there is nothing but additions and one rounding.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define TPK_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define TPK_CLONES
#endif

namespace tpkernels {
namespace {

constexpr int64_t kBlock = 512;  // elements in a buffer that stays in the first-level cache

template <typename T>
TPK_INLINE void run(std::span<const float* const> sources, const T* bias, int64_t cols, T* y,
                    int64_t begin, int64_t end) {
  alignas(64) float sums[kBlock];
  for (int64_t at = begin; at < end;) {
    const int64_t column =
        at % cols;  // a block ends with its row, so that its bias is in one piece
    const int64_t size = std::min({kBlock, end - at, cols - column});
    const float* first = sources[0] + at;
    for (int64_t i = 0; i < size; ++i) sums[i] = first[i];
    for (const float* source : sources.subspan(1)) {
      const float* next = source + at;
      for (int64_t i = 0; i < size; ++i) sums[i] += next[i];
    }
    if (bias) {
      const T* added = bias + column;
      for (int64_t i = 0; i < size; ++i) sums[i] += widen(added[i]);
    }
    T* out = y + (at - begin);
    for (int64_t i = 0; i < size; ++i) narrow(sums[i], out[i]);
    at += size;
  }
}

TPK_CLONES void run_float(std::span<const float* const> sources, const void* bias, int64_t cols,
                          void* y, int64_t begin, int64_t end) {
  run(sources, static_cast<const float*>(bias), cols, static_cast<float*>(y), begin, end);
}

TPK_CLONES void run_bfloat16(std::span<const float* const> sources, const void* bias, int64_t cols,
                             void* y, int64_t begin, int64_t end) {
  run(sources, static_cast<const BFloat16*>(bias), cols, static_cast<BFloat16*>(y), begin, end);
}

TPK_CLONES void run_float16(std::span<const float* const> sources, const void* bias, int64_t cols,
                            void* y, int64_t begin, int64_t end) {
  run(sources, static_cast<const Float16*>(bias), cols, static_cast<Float16*>(y), begin, end);
}

}  // namespace

void sum_partials(std::span<const float* const> sources, const void* bias, int64_t cols, void* y,
                  DType dtype, int64_t begin, int64_t end) {
  const auto run = dtype == DType::kFloat32    ? run_float
                   : dtype == DType::kBFloat16 ? run_bfloat16
                                               : run_float16;
  run(sources, bias, cols, y, begin, end);
}

}  // namespace tpkernels
