// M tokens, K in-features, N out-features of gate and up, N2 out-features of the layer after them.
#include "ops/gemm_glu_cpu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/epilogue_cpu.h"
#include "ops/checks.h"
#include "ops/cpu_table.h"
#include "ops/matmul.h"

namespace tpkernels {
namespace {

void check_glu(const char* op, const at::Tensor& x, const at::Tensor& w_gate,
               const at::Tensor& w_up, const std::optional<at::Tensor>& b_gate,
               const std::optional<at::Tensor>& b_up) {
  check_gemm(op, x, "w_gate", w_gate, "b_gate", b_gate);
  check_gemm(op, x, "w_up", w_up, "b_up", b_up);
  check_same_shape(op, "w_up", w_up, "w_gate", w_gate);
}

// gate and up hold the GEMMs' results; with `keep` they are left holding the pre-activations.
void bias_glu(const at::Tensor& gate_MN, const at::Tensor& up_MN,
              const std::optional<at::Tensor>& b_gate, const std::optional<at::Tensor>& b_up,
              bool keep, const at::Tensor& y_MN, Activation act) {
  const bool by_row = b_gate || b_up;
  const at::Tensor bias_gate = b_gate ? b_gate->contiguous() : at::Tensor();
  const at::Tensor bias_up = b_up ? b_up->contiguous() : at::Tensor();
  const BiasGlu params{gate_MN.const_data_ptr(),
                       up_MN.const_data_ptr(),
                       b_gate ? bias_gate.const_data_ptr() : nullptr,
                       b_up ? bias_up.const_data_ptr() : nullptr,
                       keep && b_gate ? gate_MN.mutable_data_ptr() : nullptr,
                       keep && b_up ? up_MN.mutable_data_ptr() : nullptr,
                       y_MN.mutable_data_ptr(),
                       by_row ? y_MN.size(1) : y_MN.numel(),
                       dtype_of(y_MN),
                       act};
  run_epilogue(epilogue_kernels().bias_glu, by_row ? y_MN.size(0) : 1, params);
}

bool decodes(const at::Tensor& x_MK, const at::Tensor& w_gate, const at::Tensor& w_up,
             Activation act) {
  const bool contiguous = has_contiguous_rows(w_gate) && has_contiguous_rows(w_up) &&
                          w_gate.stride(0) == w_up.stride(0);
  return cpu_way({dtype_of(w_up), act, false, x_MK.size(0), w_up.size(0), w_up.size(1), contiguous,
                  false}) == CpuWay::kDecode;
}

// In one pass: the results, and the pre-activations where `gate` and `up` are given.
void decode(const at::Tensor& x_MK, const at::Tensor& w_gate, const at::Tensor& w_up,
            const std::optional<at::Tensor>& b_gate, const std::optional<at::Tensor>& b_up,
            Activation act, const at::Tensor& y_MN, const at::Tensor* gate_MN,
            const at::Tensor* up_MN) {
  const at::Tensor x = has_contiguous_rows(x_MK) ? x_MK : x_MK.contiguous();
  const at::Tensor bias_gate = b_gate ? b_gate->contiguous() : at::Tensor();
  const at::Tensor bias_up = b_up ? b_up->contiguous() : at::Tensor();
  DecodeGemm gemm{};
  gemm.x = x.const_data_ptr();
  gemm.x_stride = x.stride(0);
  gemm.weight = w_up.const_data_ptr();
  gemm.gate = weight_data(w_gate);
  gemm.weight_stride = w_up.stride(0);
  gemm.bias = b_up ? bias_up.const_data_ptr() : nullptr;
  gemm.bias_gate = b_gate ? bias_gate.const_data_ptr() : nullptr;
  gemm.y = y_MN.mutable_data_ptr();
  gemm.pre = up_MN ? up_MN->mutable_data_ptr() : nullptr;
  gemm.pre_gate = gate_MN ? gate_MN->mutable_data_ptr() : nullptr;
  gemm.y_stride = y_MN.size(1);
  gemm.m = x.size(0);
  gemm.n = w_up.size(0);
  gemm.k = w_up.size(1);
  gemm.dtype = gemm.out = dtype_of(w_up);
  gemm.act = act;
  run_decode(gemm);
}

// d_gate may be dy.
void glu_grad(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up,
              const at::Tensor& d_gate, const at::Tensor& d_up, Activation act) {
  const at::Tensor gate_contiguous = gate.contiguous();
  const at::Tensor up_contiguous = up.contiguous();
  const GluGrad params{dy.const_data_ptr(),
                       gate_contiguous.const_data_ptr(),
                       up_contiguous.const_data_ptr(),
                       d_gate.mutable_data_ptr(),
                       d_up.mutable_data_ptr(),
                       dy.numel(),
                       dtype_of(dy),
                       act};
  run_epilogue(epilogue_kernels().glu_grad, 1, params);
}

}  // namespace

at::Tensor gemm_glu_cpu(const at::Tensor& x, const at::Tensor& w_gate, const at::Tensor& w_up,
                        const std::optional<at::Tensor>& b_gate,
                        const std::optional<at::Tensor>& b_up, std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_glu("gemm_glu", x, w_gate, w_up, b_gate, b_up);
  const at::Tensor x_MK = as_matrix(x);
  if (decodes(x_MK, w_gate, w_up, activation)) {
    const at::Tensor y_MN = at::empty({x_MK.size(0), w_gate.size(0)}, x.options());
    decode(x_MK, w_gate, w_up, b_gate, b_up, activation, y_MN, nullptr, nullptr);
    return y_MN.view(with_last_size(x, w_gate.size(0)));
  }
  const at::Tensor y_MN = matmul(x_MK, w_gate.t());
  const at::Tensor up_MN = matmul(x_MK, w_up.t());
  bias_glu(y_MN, up_MN, b_gate, b_up, /*keep=*/false, y_MN, activation);
  return y_MN.view(with_last_size(x, w_gate.size(0)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gemm_glu_aux_cpu(
    const at::Tensor& x, const at::Tensor& w_gate, const at::Tensor& w_up,
    const std::optional<at::Tensor>& b_gate, const std::optional<at::Tensor>& b_up,
    std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_glu("gemm_glu_aux", x, w_gate, w_up, b_gate, b_up);
  const at::Tensor x_MK = as_matrix(x);
  at::Tensor gate_MN, up_MN, y_MN;
  if (decodes(x_MK, w_gate, w_up, activation)) {
    gate_MN = at::empty({x_MK.size(0), w_gate.size(0)}, x.options());
    up_MN = at::empty_like(gate_MN);
    y_MN = at::empty_like(gate_MN);
    decode(x_MK, w_gate, w_up, b_gate, b_up, activation, y_MN, &gate_MN, &up_MN);
  } else {
    gate_MN = matmul(x_MK, w_gate.t());
    up_MN = matmul(x_MK, w_up.t());
    y_MN = at::empty_like(gate_MN);
    bias_glu(gate_MN, up_MN, b_gate, b_up, /*keep=*/true, y_MN, activation);
  }
  const std::vector<int64_t> sizes = with_last_size(x, w_gate.size(0));
  return {y_MN.view(sizes), gate_MN.view(sizes), up_MN.view(sizes)};
}

std::tuple<at::Tensor, at::Tensor> glu_grad_cpu(const at::Tensor& dy, const at::Tensor& gate,
                                                const at::Tensor& up, std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_dtype("glu_grad", "dy", dy);
  check_same_shape("glu_grad", "gate", gate, "dy", dy);
  check_same_shape("glu_grad", "up", up, "dy", dy);
  check_same_dtype("glu_grad", "gate", gate, "dy", dy);
  check_same_dtype("glu_grad", "up", up, "dy", dy);
  const at::Tensor d_gate = at::empty(dy.sizes(), dy.options());
  const at::Tensor d_up = at::empty(dy.sizes(), dy.options());
  glu_grad(dy.contiguous(), gate, up, d_gate, d_up, activation);
  return {d_gate, d_up};
}

std::tuple<at::Tensor, at::Tensor> gemm_dglu_cpu(const at::Tensor& dy, const at::Tensor& weight,
                                                 const at::Tensor& gate, const at::Tensor& up,
                                                 std::string_view act) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm_backward("gemm_dglu", dy, weight, "gate", gate);
  check_gemm_backward("gemm_dglu", dy, weight, "up", up);
  const at::Tensor d_gate = matmul(as_matrix(dy), weight).view(gate.sizes());
  const at::Tensor d_up = at::empty_like(d_gate);
  glu_grad(d_gate, gate, up, d_gate, d_up, activation);
  return {d_gate, d_up};
}

}  // namespace tpkernels
