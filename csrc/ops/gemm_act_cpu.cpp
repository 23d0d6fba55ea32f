// M tokens, K in-features, N out-features, N2 out-features of the layer after it.
#include "ops/gemm_act_cpu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/epilogue_cpu.h"
#include "ops/checks.h"
#include "ops/matmul.h"

namespace tpkernels {
namespace {

// bias is contiguous and owned by the caller for the call.
void bias_act(const at::Tensor& h_MN, const std::optional<at::Tensor>& bias, at::Tensor* pre,
              const at::Tensor& y_MN, Activation act) {
  const bool by_row = bias.has_value();
  const int64_t rows = by_row ? h_MN.size(0) : 1;
  const BiasAct params{h_MN.const_data_ptr(),
                       by_row ? bias->const_data_ptr() : nullptr,
                       pre ? pre->mutable_data_ptr() : nullptr,
                       y_MN.mutable_data_ptr(),
                       by_row ? h_MN.size(1) : h_MN.numel(),
                       dtype_of(h_MN),
                       act};
  run_epilogue(epilogue_kernels().bias_act, rows, params);
}

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(tensor->contiguous()) : std::nullopt;
}

}  // namespace

at::Tensor gemm_act_cpu(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm("gemm_act", x, "weight", weight, "bias", bias);
  at::Tensor y_MN = matmul(as_matrix(x), weight.t());
  if (bias || activation != Activation::kNone) {
    bias_act(y_MN, contiguous(bias), nullptr, y_MN, activation);
  }
  return y_MN.view(with_last_size(x, weight.size(0)));
}

std::tuple<at::Tensor, at::Tensor> gemm_act_aux_cpu(const at::Tensor& x, const at::Tensor& weight,
                                                    const std::optional<at::Tensor>& bias,
                                                    std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm("gemm_act_aux", x, "weight", weight, "bias", bias);
  at::Tensor pre_MN = matmul(as_matrix(x), weight.t());
  at::Tensor y_MN = at::empty_like(pre_MN);
  bias_act(pre_MN, contiguous(bias), bias ? &pre_MN : nullptr, y_MN, activation);
  const std::vector<int64_t> sizes = with_last_size(x, weight.size(0));
  return {y_MN.view(sizes), pre_MN.view(sizes)};
}

at::Tensor act_grad_cpu(const at::Tensor& dy, const at::Tensor& pre, std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_dtype("act_grad", "dy", dy);
  check_same_shape("act_grad", "pre", pre, "dy", dy);
  check_same_dtype("act_grad", "pre", pre, "dy", dy);
  const at::Tensor dy_contiguous = dy.contiguous();
  const at::Tensor pre_contiguous = pre.contiguous();
  at::Tensor dx = at::empty(dy.sizes(), dy.options());
  const ActGrad params{dy_contiguous.const_data_ptr(),
                       pre_contiguous.const_data_ptr(),
                       dx.mutable_data_ptr(),
                       dy.numel(),
                       dtype_of(dy),
                       activation};
  run_epilogue(epilogue_kernels().act_grad, 1, params);
  return dx;
}

at::Tensor gemm_dact_cpu(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& pre,
                         std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm_backward("gemm_dact", dy, weight, "pre", pre);
  at::Tensor dx_MN = matmul(as_matrix(dy), weight);
  if (activation != Activation::kNone) {
    const at::Tensor pre_contiguous = pre.contiguous();
    const ActGrad params{dx_MN.const_data_ptr(),
                         pre_contiguous.const_data_ptr(),
                         dx_MN.mutable_data_ptr(),
                         dx_MN.numel(),
                         dtype_of(dy),
                         activation};
    run_epilogue(epilogue_kernels().act_grad, 1, params);
  }
  return dx_MN.view(pre.sizes());
}

}  // namespace tpkernels
