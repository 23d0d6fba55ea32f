// PyTorch's options of a collective, as the collectives over peer memory take them.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/collectives.h"

namespace tpkernels {

template <typename Options>
bool is_asynchronous(const Options& opts) {
  if constexpr (requires { opts.asyncOp; }) {
    return opts.asyncOp;
  } else {
    return true;
  }
}

template <typename Options>
std::optional<Seconds> time_limit(const Options& opts) {
  if (opts.timeout == c10d::kUnsetTimeout) return std::nullopt;
  return std::chrono::duration_cast<Seconds>(opts.timeout);
}

// `tensor` must outlive it.
inline CallOptions call_options(const at::Tensor& tensor, std::optional<Seconds> timeout) {
  return {std::span<const int64_t>(tensor.sizes().data(), tensor.sizes().size()), timeout};
}

}  // namespace tpkernels
