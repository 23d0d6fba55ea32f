// The library GEMM under the fused ops, and the sharing out of epilogue units to ATen's threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tpkernels {

// x [..., K] as [M, K]: a view where the strides allow it, else a copy.
at::Tensor as_matrix(const at::Tensor& x);

// x.sizes() with the last one replaced by `last`.
std::vector<int64_t> with_last_size(const at::Tensor& x, int64_t last);

// A new, contiguous a [M, K] @ b [K, N], through ATen (MKL or oneDNN below it); b in any layout.
at::Tensor matmul(const at::Tensor& a_MK, const at::Tensor& b_KN);

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
