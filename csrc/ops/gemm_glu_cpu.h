// CPU kernels of gemm_glu, gemm_glu_aux, glu_grad and gemm_dglu. Meaning, shapes and errors are
// those of the ops in tpkernels/ops/gemm_glu.py. Inputs are not changed, outputs share no memory
// with them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace tpkernels {

at::Tensor gemm_glu_cpu(const at::Tensor& x, const at::Tensor& w_gate, const at::Tensor& w_up,
                        const std::optional<at::Tensor>& b_gate,
                        const std::optional<at::Tensor>& b_up, std::string_view act);

std::tuple<at::Tensor, at::Tensor, at::Tensor> gemm_glu_aux_cpu(
    const at::Tensor& x, const at::Tensor& w_gate, const at::Tensor& w_up,
    const std::optional<at::Tensor>& b_gate, const std::optional<at::Tensor>& b_up,
    std::string_view act);

std::tuple<at::Tensor, at::Tensor> glu_grad_cpu(const at::Tensor& dy, const at::Tensor& gate,
                                                const at::Tensor& up, std::string_view act);

std::tuple<at::Tensor, at::Tensor> gemm_dglu_cpu(const at::Tensor& dy, const at::Tensor& weight,
                                                 const at::Tensor& gate, const at::Tensor& up,
                                                 std::string_view act);

}  // namespace tpkernels
