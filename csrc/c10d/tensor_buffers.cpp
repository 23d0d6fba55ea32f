#include "c10d/tensor_buffers.h"

#include <utility>

namespace tpkernels {
namespace {

// Whether memory holds the elements themselves, one beside the other.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

ElementType reduced_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kLong:
      return ElementType::kInt64;
    case at::kInt:
      return ElementType::kInt32;
    case at::kShort:
      return ElementType::kInt16;
    case at::kChar:
      return ElementType::kInt8;
    case at::kByte:
      return ElementType::kUInt8;
    case at::kBool:
      return ElementType::kBool;
    default:
      return ElementType::kNone;
  }
}

Unit moved_unit(at::ScalarType type) {
  const ElementType known = reduced_type(type);
  if (known != ElementType::kNone) return {known, 1};
  return {ElementType::kByte, static_cast<int64_t>(c10::elementSize(type))};
}

std::optional<Reduction> reduction_of(const c10d::ReduceOp& operation) {
  switch (operation.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction::kSum;
    case c10d::ReduceOp::AVG:
      return Reduction::kAvg;
    case c10d::ReduceOp::MAX:
      return Reduction::kMax;
    case c10d::ReduceOp::MIN:
      return Reduction::kMin;
    default:
      return std::nullopt;
  }
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided;
}

void write_back(const at::Tensor& tensor, const at::Tensor& values) {
  at::Tensor target = tensor, source = values;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 || tensor.size(dim) < 2) continue;
    target = target.narrow(dim, 0, 1);
    source = source.narrow(dim, 0, 1);
  }
  target.copy_(source);
}

Input::Input(const at::Tensor& tensor)
    : dense_(is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous()) {}

Output::Output(at::Tensor tensor)
    : tensor_(std::move(tensor)),
      dense_(is_plain(tensor_) ? tensor_ : at::empty(tensor_.sizes(), tensor_.options())) {}

void Output::load() {
  if (!dense_.is_same(tensor_)) dense_.copy_(tensor_);
}

void Output::store() {
  if (!dense_.is_same(tensor_)) write_back(tensor_, dense_);
}

}  // namespace tpkernels
