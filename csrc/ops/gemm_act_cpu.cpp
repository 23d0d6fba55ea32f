// M tokens, K in-features, N out-features, N2 out-features of the layer after it.
#include "ops/gemm_act_cpu.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/epilogue_cpu.h"
#include "ops/checks.h"
#include "ops/cpu_table.h"
#include "ops/matmul.h"
#include "ops/onednn_linear.h"

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

CpuWay way_of(const at::Tensor& x_MK, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias, Activation act, bool plain) {
  return cpu_way({dtype_of(weight), act, bias.has_value(), x_MK.size(0), weight.size(0),
                  weight.size(1), has_contiguous_rows(weight),
                  plain && at::hasMKLDNN() && at::globalContext().userEnabledMkldnn()});
}

// In one pass: the results, and the pre-activations where `pre` is given.
void decode(const at::Tensor& x_MK, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            Activation act, const at::Tensor& y_MN, const at::Tensor* pre_MN) {
  const at::Tensor x = has_contiguous_rows(x_MK) ? x_MK : x_MK.contiguous();
  const std::optional<at::Tensor> bias_N = contiguous(bias);
  DecodeGemm gemm{};
  gemm.x = x.const_data_ptr();
  gemm.x_stride = x.stride(0);
  gemm.weight = weight.const_data_ptr();
  gemm.weight_stride = weight.stride(0);
  gemm.bias = bias_N ? bias_N->const_data_ptr() : nullptr;
  gemm.y = y_MN.mutable_data_ptr();
  gemm.pre = pre_MN ? pre_MN->mutable_data_ptr() : nullptr;
  gemm.y_stride = y_MN.size(1);
  gemm.m = x.size(0);
  gemm.n = weight.size(0);
  gemm.k = weight.size(1);
  gemm.dtype = gemm.out = dtype_of(weight);
  gemm.act = act;
  run_decode(gemm);
}

}  // namespace

at::Tensor gemm_act_cpu(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm("gemm_act", x, "weight", weight, "bias", bias);
  const at::Tensor x_MK = as_matrix(x);
  const std::vector<int64_t> sizes = with_last_size(x, weight.size(0));
  switch (way_of(x_MK, weight, bias, activation, /*plain=*/true)) {
    case CpuWay::kDecode: {
      const at::Tensor y = at::empty(sizes, x.options());
      decode(x_MK, weight, bias, activation, y.view({x_MK.size(0), weight.size(0)}), nullptr);
      return y;
    }
    case CpuWay::kOneDnn:
      return onednn_linear(x_MK, weight, contiguous(bias), activation).view(sizes);
    case CpuWay::kLibrary:
      break;
  }
  const at::Tensor y_MN = matmul(x_MK, weight.t());
  if (bias || activation != Activation::kNone) {
    bias_act(y_MN, contiguous(bias), nullptr, y_MN, activation);
  }
  return y_MN.view(sizes);
}

std::tuple<at::Tensor, at::Tensor> gemm_act_aux_cpu(const at::Tensor& x, const at::Tensor& weight,
                                                    const std::optional<at::Tensor>& bias,
                                                    std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm("gemm_act_aux", x, "weight", weight, "bias", bias);
  const at::Tensor x_MK = as_matrix(x);
  const std::vector<int64_t> sizes = with_last_size(x, weight.size(0));
  at::Tensor pre_MN, y_MN;
  if (way_of(x_MK, weight, bias, activation, /*plain=*/false) == CpuWay::kDecode) {
    pre_MN = at::empty({x_MK.size(0), weight.size(0)}, x.options());
    y_MN = at::empty_like(pre_MN);
    decode(x_MK, weight, bias, activation, y_MN, &pre_MN);
  } else {
    pre_MN = matmul(x_MK, weight.t());
    y_MN = at::empty_like(pre_MN);
    bias_act(pre_MN, contiguous(bias), bias ? &pre_MN : nullptr, y_MN, activation);
  }
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
