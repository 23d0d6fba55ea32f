// CPU kernels of gemm_act, gemm_act_aux, act_grad and gemm_dact. Meaning, shapes and errors are
// those of the ops in tpkernels/ops/gemm_act.py. What multiplies is chosen by ops/cpu_table.h.
// Inputs are not changed, outputs share no memory with them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace tpkernels {

at::Tensor gemm_act_cpu(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, std::string_view act);

std::tuple<at::Tensor, at::Tensor> gemm_act_aux_cpu(const at::Tensor& x, const at::Tensor& weight,
                                                    const std::optional<at::Tensor>& bias,
                                                    std::string_view act);

at::Tensor act_grad_cpu(const at::Tensor& dy, const at::Tensor& pre, std::string_view act);

at::Tensor gemm_dact_cpu(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& pre,
                         std::string_view act);

}  // namespace tpkernels
