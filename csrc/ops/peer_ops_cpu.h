// Ops that go through peer memory: torch.ops.tpkernels.{all_reduce_peer_, gemm_all_reduce_fused,
// mlp_fused}. The group must be one of peers (`register_peer_group`); callers in Python ask first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tpkernels {

// x becomes the reduction over the group: "sum", "avg", "max" or "min". Any dense layout.
void all_reduce_peer_(at::Tensor x, std::string_view group_name, std::string_view reduction);

// The same, past the dispatcher: of a call at decode size that is a third. False, and nothing done,
// where the op must be asked (or refuses): another device or layout, no such group, no such
// reduction.
bool all_reduce_contiguous(const at::Tensor& x, const std::string& group_name,
                           std::string_view reduction);

// all_reduce(F.linear(x, weight)) + bias. x [..., K_r], weight [N, K_r], bias [N] -> [..., N].
at::Tensor gemm_all_reduce_fused(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias,
                                 std::string_view group_name);

// The whole MLP as tpkernels::mlp; arguments as there.
at::Tensor mlp_fused(const at::Tensor& x, const at::Tensor& w_up,
                     const std::optional<at::Tensor>& b_up, const std::optional<at::Tensor>& w_gate,
                     const std::optional<at::Tensor>& b_gate, const at::Tensor& w_down,
                     const std::optional<at::Tensor>& b_down, std::string_view act,
                     std::string_view group_name);

}  // namespace tpkernels
