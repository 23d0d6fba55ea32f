// Tensors as the collectives take them: a pointer, a count and a type.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "runtime/signature.h"

namespace tpkernels {

// One element as so many units of a type.
struct Unit {
  ElementType type;
  int64_t per_element;
};

// For moving: any type is moved, bit by bit.
Unit moved_unit(at::ScalarType type);
// For reducing: kNone where reductions do not know it.
ElementType reduced_type(at::ScalarType type);
std::optional<Reduction> reduction_of(const c10d::ReduceOp& operation);

// On the CPU, with strides.
bool is_dense(const at::Tensor& tensor);

// tensor = values [of its sizes], also where elements of it share memory, as of an expanded one:
// values are alike there.
void write_back(const at::Tensor& tensor, const at::Tensor& values);

// A tensor that is read: its elements side by side, of itself or of a copy.
class Input {
 public:
  explicit Input(const at::Tensor& tensor);
  const void* data() const { return dense_.const_data_ptr(); }
  const at::Tensor& dense() const { return dense_; }

 private:
  at::Tensor dense_;
};

// A tensor that is written: side by side, in itself or in a copy that store() brings back.
class Output {
 public:
  explicit Output(at::Tensor tensor);
  void load();   // what the tensor holds now is needed
  void store();  // what was written becomes the tensor's
  void* data() const { return dense_.data_ptr(); }

 private:
  at::Tensor tensor_;
  at::Tensor dense_;
};

}  // namespace tpkernels
