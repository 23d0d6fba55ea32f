#include "comm/call.h"

#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

namespace tpkernels {
namespace {

std::optional<ReduceType> reduce_type(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return ReduceType::kFloat64;
    case ElementType::kFloat32:
      return ReduceType::kFloat32;
    case ElementType::kBFloat16:
      return ReduceType::kBFloat16;
    case ElementType::kFloat16:
      return ReduceType::kFloat16;
    case ElementType::kInt64:
      return ReduceType::kInt64;
    case ElementType::kInt32:
      return ReduceType::kInt32;
    case ElementType::kInt16:
      return ReduceType::kInt16;
    case ElementType::kInt8:
      return ReduceType::kInt8;
    case ElementType::kUInt8:
    case ElementType::kBool:
      return ReduceType::kUInt8;
    default:
      return std::nullopt;
  }
}

std::optional<ReduceOp> reduce_op(ElementType type, Reduction reduction) {
  const bool is_bool = type == ElementType::kBool;
  switch (reduction) {
    case Reduction::kSum:
      return is_bool ? ReduceOp::kMax : ReduceOp::kSum;  // "or"
    case Reduction::kAvg:
      return is_bool ? std::nullopt : std::optional(ReduceOp::kAvg);
    case Reduction::kMax:
      return ReduceOp::kMax;
    case Reduction::kMin:
      return ReduceOp::kMin;
    default:
      return std::nullopt;
  }
}

Signature start_of(Purpose purpose, ElementType type, const CallOptions& options) {
  if (options.purpose) purpose = *options.purpose;
  Signature signature;
  signature.collective = purpose.collective;
  signature.type = type;
  signature.reduction = purpose.reduction;
  signature.root = purpose.root;
  return signature;
}

int64_t elements_of(std::span<const int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

Signature signature_of(Collective collective, ElementType type, Reduction reduction, int root,
                       int64_t count, const CallOptions& options) {
  Signature signature = start_of({collective, reduction, root}, type, options);
  if (options.shape.empty()) {
    signature.add_dim(count);
  } else {
    for (const int64_t size : options.shape) signature.add_dim(size);
    if (elements_of(options.shape) != count) signature.add_detail(count);
  }
  return signature;
}

Signature signature_of(Collective collective, ElementType type, Reduction reduction, int root,
                       std::span<const int64_t> counts, const CallOptions& options) {
  Signature signature = start_of({collective, reduction, root}, type, options);
  for (const int64_t size : options.shape) signature.add_dim(size);
  if (options.shape.empty()) {
    signature.add_dim(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  }
  // What the dims do not say. Equal counts are said by their total, and by the shape of one part.
  const bool equal = std::all_of(counts.begin(), counts.end(),
                                 [&](int64_t count) { return count == counts.front(); });
  if (!equal || (!options.shape.empty() && elements_of(options.shape) != counts.front())) {
    for (const int64_t count : counts) signature.add_detail(count);
  }
  return signature;
}

void check_size(const PeerGroup& group, const char* name, size_t size) {
  if (size == static_cast<size_t>(group.world())) return;
  throw std::invalid_argument(std::string(name) + ": " + std::to_string(size) + " for a group of " +
                              std::to_string(group.world()) +
                              " ranks. Fix: give one for each rank");
}

void check_root(const PeerGroup& group, int root) {
  if (root >= 0 && root < group.world()) return;
  throw std::invalid_argument(
      "root: " + std::to_string(root) + "; allowed: ranks of the group, 0 to " +
      std::to_string(group.world() - 1) + ". Fix: give the rank in the group, not the global one");
}

bool can_reduce(ElementType type, Reduction reduction) {
  return reduce_type(type).has_value() && reduce_op(type, reduction).has_value();
}

ReduceFunction reduce_function(ElementType type, Reduction reduction) {
  if (!can_reduce(type, reduction)) {
    const Signature signature = start_of({Collective::kAllReduce, reduction}, type, {});
    throw std::invalid_argument(
        "no reduction as of " + signature.text() +
        "; allowed: sum, avg, max, min of float64, float32, bfloat16, float16, int64, int32, "
        "int16, int8, uint8, and sum, max, min of bool. Fix: convert the tensor first");
  }
  return reduce_kernels().function(*reduce_type(type), *reduce_op(type, reduction));
}

}  // namespace tpkernels
