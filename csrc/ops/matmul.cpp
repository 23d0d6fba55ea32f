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

// Columns of a decode GEMM that a thread takes at a time: whole tiles of the kernels.
constexpr int64_t kUnitColumns = 16;
// ASSUMPTION: waking a thread costs some microseconds, as long as reading so many bytes of weights
// from the cache does (60 GB/s a core were measured), or fewer where there are several rows.
constexpr int64_t kGrainBytes = 256 * 1024;
constexpr int64_t kRowsAtSpeed = 4;  // rows that cost no more than the reading of the weights

// Not at::parallel_for: its template would need this library to be compiled with the OpenMP of the
// PyTorch it is built for, and would run on one thread without.
void parallel_for(int64_t units, int64_t grain, void (*work)(int64_t, int64_t, void*),
                  void* context) {
  TORCH_CHECK(torch_parallel_for(0, units, grain, work, context) == 0,
              "torch_parallel_for failed (see the message above)");
}

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
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

void run_decode(const DecodeGemm& gemm) {
  if (gemm.m == 0 || gemm.n == 0) return;
  const int64_t unit_bytes = kUnitColumns * std::max<int64_t>(1, gemm.k) * size_of(gemm.dtype) *
                             (gemm.gate ? 2 : 1) * std::max<int64_t>(1, gemm.m / kRowsAtSpeed);
  parallel_for((gemm.n + kUnitColumns - 1) / kUnitColumns,
               std::max<int64_t>(1, kGrainBytes / unit_bytes),
               [](int64_t begin, int64_t end, void* pointer) {
                 const auto* g = static_cast<const DecodeGemm*>(pointer);
                 decode_kernels().run(*g, begin * kUnitColumns, std::min(end * kUnitColumns, g->n));
               },
               const_cast<DecodeGemm*>(&gemm));
}

void for_each_unit(int64_t rows, int64_t cols, void (*work)(int64_t, int64_t, void*),
                   void* context) {
  const int64_t units = rows * blocks_of(cols);
  if (units == 0) return;
  const int64_t unit_elements = std::min(cols, kEpilogueBlock);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / unit_elements);
  parallel_for(units, grain, work, context);
}

}  // namespace tpkernels
