// oneDNN's GEMM with an epilogue of its own, through the operator that torch.compile uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/activation.h"

namespace tpkernels {

// act(x weight^T + bias), x [M, K], weight [N, K]; see onednn_serves in ops/cpu_table.h.
at::Tensor onednn_linear(const at::Tensor& x_MK, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, Activation act);

}  // namespace tpkernels
