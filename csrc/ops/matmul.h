// The GEMMs under the fused ops, and the sharing out of their work to ATen's threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/gemm_decode_cpu.h"

namespace tpkernels {

// x [..., K] as [M, K]: a view where the strides allow it, else a copy.
at::Tensor as_matrix(const at::Tensor& x);

// x.sizes() with the last one replaced by `last`.
std::vector<int64_t> with_last_size(const at::Tensor& x, int64_t last);

// A new, contiguous a [M, K] @ b [K, N], through ATen (MKL or oneDNN below it); b in any layout.
// In one call, the epilogue in a pass of its own after it: row panels with the epilogue on each
// while it is in cache were measured slower (512 x 1024 x 4096 on one core, panels of 256, 128, 64
// rows: the GEMM alone loses 2, 14, 24 % in fp32 and 2, 10, 26 % in bf16, the pass is 2 to 6 % of
// it).
at::Tensor matmul(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Whether the elements of a row of a [rows, K] are adjacent.
inline bool has_contiguous_rows(const at::Tensor& a) { return a.stride(1) == 1 || a.size(1) <= 1; }

// The elements of `weights`, for DecodeGemm: not null, which means something there, where there are
// none.
inline const void* weight_data(const at::Tensor& weights) {
  static constexpr double kNone = 0;
  return weights.numel() == 0 ? &kNone : weights.const_data_ptr();
}

// The columns of `gemm`, shared out to the threads of torch.set_num_threads.
void run_decode(const DecodeGemm& gemm);

// work(begin, end) over [0, rows * blocks_of(cols)) on the threads of torch.set_num_threads.
void for_each_unit(int64_t rows, int64_t cols, void (*work)(int64_t, int64_t, void*),
                   void* context);

// The same for the parameters of an epilogue and its function.
template <typename Params>
void run_epilogue(void (*epilogue)(const Params&, int64_t, int64_t), int64_t rows,
                  const Params& params) {
  struct Context {
    void (*epilogue)(const Params&, int64_t, int64_t);
    const Params* params;
  } context{epilogue, &params};
  for_each_unit(
      rows, params.cols,
      [](int64_t begin, int64_t end, void* pointer) {
        const auto* c = static_cast<const Context*>(pointer);
        c->epilogue(*c->params, begin, end);
      },
      &context);
}

}  // namespace tpkernels
