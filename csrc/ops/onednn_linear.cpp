#include "ops/onednn_linear.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace tpkernels {
namespace {

using Scalars = torch::List<std::optional<at::Scalar>>;
using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          std::string_view, Scalars, std::optional<std::string_view>);

// Names as in ATen's native/mkldnn/Utils.cpp.
std::string_view attribute_of(Activation act) {
  switch (act) {
    case Activation::kGelu:
    case Activation::kGeluTanh:
      return "gelu";
    case Activation::kSilu:
      return "swish";
    case Activation::kRelu:
      return "relu";
    case Activation::kNone:
    case Activation::kRelu2:
      break;
  }
  return "none";
}

}  // namespace

at::Tensor onednn_linear(const at::Tensor& x_MK, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, Activation act) {
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                                 .typed<Linear>();
  return linear.call(x_MK, weight, bias, attribute_of(act), Scalars(),
                     act == Activation::kGeluTanh ? "tanh" : "none");
}

}  // namespace tpkernels
