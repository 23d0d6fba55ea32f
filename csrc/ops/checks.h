// Argument checks of the CPU ops: the same conditions and words as tpkernels/library.py's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

#include "common/activation.h"
#include "common/dtype.h"

namespace tpkernels {

// What a failed check throws: a c10::Error, unless set to something else (it must throw).
void set_config_error(void (*raise)(const std::string& message));

Activation parse_activation(std::string_view act);

// dtype of a tensor that has passed check_dtype.
DType dtype_of(const at::Tensor& tensor);

// `tensor` is fp64, fp32, bf16 or fp16.
void check_dtype(const char* op, const char* name, const at::Tensor& tensor);

void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                      const char* other_name, const at::Tensor& other);

void check_same_shape(const char* op, const char* name, const at::Tensor& tensor,
                      const char* other_name, const at::Tensor& other);

// x [..., K], weight [N, K], bias [N], all of one dtype.
void check_gemm(const char* op, const at::Tensor& x, const char* weight_name,
                const at::Tensor& weight, const char* bias_name,
                const std::optional<at::Tensor>& bias);

// dy [..., N2], weight [N2, N], pre [..., N], all of one dtype.
void check_gemm_backward(const char* op, const at::Tensor& dy, const at::Tensor& weight,
                         const char* pre_name, const at::Tensor& pre);

// A bias of a gate needs the gate.
void check_gate(const char* op, const std::optional<at::Tensor>& gate,
                const std::optional<at::Tensor>& bias);

}  // namespace tpkernels
