#include "ops/checks.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <string>

namespace tpkernels {
namespace {

void (*raise_config_error)(const std::string&) = nullptr;

// Not given a condition: what it says is then put together only when it is said.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  const std::string message = c10::str(parts...);
  if (raise_config_error) raise_config_error(message);
  TORCH_CHECK(false, message);
}

// As Python prints it: torch.float32.
std::string torch_name(at::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

// As Python prints a tuple: (2, 3).
std::string shape_of(const at::Tensor& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + (tensor.dim() == 1 ? ",)" : ")");
}

}  // namespace

void set_config_error(void (*raise)(const std::string& message)) { raise_config_error = raise; }

Activation parse_activation(std::string_view act) {
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (act == kActivationNames[i]) return kActivations[i];
  }
  std::string allowed;
  for (const auto& name : kActivationNames)
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  fail("act='", act, "' is not known; allowed: ", allowed);
}

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(tensor.scalar_type() == at::kHalf);
      return DType::kFloat16;
  }
}

void check_dtype(const char* op, const char* name, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) {
    return;
  }
  fail(op, ": ", name, " has dtype ", torch_name(dtype),
       "; allowed: float64, float32, bfloat16, float16. Fix: ", name, ".float()");
}

void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                      const char* other_name, const at::Tensor& other) {
  if (tensor.scalar_type() == other.scalar_type()) return;
  const std::string wanted = torch_name(other.scalar_type());
  fail(op, ": ", name, " is ", torch_name(tensor.scalar_type()), " but ", other_name, " is ",
       wanted, "; all tensors need one dtype. Fix: ", name, ".to(", wanted,
       ") or run under torch.autocast");
}

void check_weight_dtype(const char* op, const char* name, const at::Tensor& weight,
                        const char* input_name, const at::Tensor& input) {
  if (weight.scalar_type() == input.scalar_type()) return;
  const std::string given = torch_name(input.scalar_type());
  const std::string wanted = torch_name(weight.scalar_type());
  fail(op, ": ", name, " is ", wanted, " but ", input_name, " is ", given,
       "; all tensors need one dtype. Fix: ", input_name, ".to(", wanted, "), module.to(", given,
       "), or run under torch.autocast");
}

void check_same_shape(const char* op, const char* name, const at::Tensor& tensor,
                      const char* other_name, const at::Tensor& other) {
  if (tensor.sizes() == other.sizes()) return;
  fail(op, ": ", name, " must have the shape of ", other_name, ", ", shape_of(other), ", got ",
       shape_of(tensor));
}

void check_gemm(const char* op, const at::Tensor& x, const char* weight_name,
                const at::Tensor& weight, const char* bias_name,
                const std::optional<at::Tensor>& bias) {
  check_dtype(op, "x", x);
  if (weight.dim() != 2) {
    fail(op, ": ", weight_name, " must be [N, K], got ", weight.dim(), "-D ", shape_of(weight));
  }
  if (x.dim() < 1 || x.size(-1) != weight.size(1)) {
    fail(op, ": x must be [..., K] with K=", weight.size(1), " as ", weight_name, " ",
         shape_of(weight), " [N, K] says, got ", shape_of(x),
         ". A weight kept as [K, N] is passed as its .t()");
  }
  check_weight_dtype(op, weight_name, weight, "x", x);
  if (!bias) return;
  if (bias->dim() != 1 || bias->size(0) != weight.size(0)) {
    fail(op, ": ", bias_name, " must be [N] with N=", weight.size(0), ", got ", shape_of(*bias));
  }
  check_same_dtype(op, bias_name, *bias, "x", x);
}

void check_gemm_backward(const char* op, const at::Tensor& dy, const at::Tensor& weight,
                         const char* pre_name, const at::Tensor& pre) {
  check_dtype(op, "dy", dy);
  if (weight.dim() != 2 || dy.dim() < 1 || dy.size(-1) != weight.size(0)) {
    fail(op, ": dy must be [..., N2] and weight [N2, N], got ", shape_of(dy), " and ",
         shape_of(weight));
  }
  if (pre.dim() != dy.dim() || pre.size(-1) != weight.size(1) ||
      pre.sizes().slice(0, pre.dim() - 1) != dy.sizes().slice(0, dy.dim() - 1)) {
    fail(op, ": ", pre_name, " must have dy's leading dimensions ", shape_of(dy),
         " and weight's N=", weight.size(1), ", got ", shape_of(pre));
  }
  check_weight_dtype(op, "weight", weight, "dy", dy);
  check_same_dtype(op, pre_name, pre, "dy", dy);
}

void check_gate(const char* op, const std::optional<at::Tensor>& gate,
                const std::optional<at::Tensor>& bias) {
  if (!gate && bias) fail(op, ": b_gate was given without w_gate. Fix: give both or neither");
}

}  // namespace tpkernels
