#include "ops/matmul.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>

#include "kernels/epilogue_cpu.h"

namespace tpkernels {

namespace {
// ATen's own grain is 32,768 elements of cheap arithmetic; an activation costs several times that.
constexpr int64_t kGrainElements = 8192;
}  // namespace

at::Tensor as_matrix(const at::Tensor& x) {
  // Not reshape({-1, K}): K may be 0.
  const int64_t k = x.size(-1);
  int64_t m = 1;
  for (const int64_t size : x.sizes().slice(0, x.dim() - 1)) m *= size;
  return x.reshape({m, k});
}

std::vector<int64_t> with_last_size(const at::Tensor& x, int64_t last) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

at::Tensor matmul(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  at::Tensor out = at::empty({a_MK.size(0), b_KN.size(1)}, a_MK.options());
  at::mm_out(out, a_MK, b_KN);
  return out;
}

void for_each_unit(int64_t rows, int64_t cols, void (*work)(int64_t, int64_t, void*),
                   void* context) {
  const int64_t units = rows * blocks_of(cols);
  if (units == 0) return;
  const int64_t unit_elements = std::min(cols, kEpilogueBlock);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / unit_elements);
  // Not at::parallel_for: its template would need this library to be compiled with the OpenMP of
  // the PyTorch it is built for, and would run on one thread without.
  TORCH_CHECK(torch_parallel_for(0, units, grain, work, context) == 0,
              "torch_parallel_for failed (see the message above)");
}

}  // namespace tpkernels
