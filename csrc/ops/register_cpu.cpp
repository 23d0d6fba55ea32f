#include "ops/register_cpu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "ops/checks.h"
#include "ops/gemm_act_cpu.h"
#include "ops/gemm_glu_cpu.h"

namespace tpkernels {

namespace {
// Not destroyed at exit: by then the dispatcher may be gone.
torch::Library* library = nullptr;
torch::Library* autograd_library = nullptr;

using OptionalTensor = std::optional<at::Tensor>;

template <typename... T>
bool needs_grad(const T&... tensors) {
  const auto required = [](const OptionalTensor& tensor) {
    return tensor && tensor->requires_grad();
  };
  return at::GradMode::is_enabled() && (required(tensors) || ...);
}

// An op of ours, found once.
template <typename Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The Autograd kernels of tpkernels/ops/gemm_act.py and gemm_glu.py once more, for CPU tensors:
// Python's way between dispatcher and kernel would show in a call at decode size.
at::Tensor gemm_act_autograd(const at::Tensor& x, const at::Tensor& weight,
                             const OptionalTensor& bias, std::string_view act) {
  static const auto plain = op<decltype(gemm_act_cpu)>("tpkernels::gemm_act");
  static const auto aux = op<decltype(gemm_act_aux_cpu)>("tpkernels::gemm_act_aux");
  if (needs_grad(x, weight, bias)) return std::get<0>(aux.call(x, weight, bias, act));
  at::AutoDispatchBelowAutograd below_autograd;
  return plain.call(x, weight, bias, act);
}

at::Tensor gemm_glu_autograd(const at::Tensor& x, const at::Tensor& w_gate, const at::Tensor& w_up,
                             const OptionalTensor& b_gate, const OptionalTensor& b_up,
                             std::string_view act) {
  static const auto plain = op<decltype(gemm_glu_cpu)>("tpkernels::gemm_glu");
  static const auto aux = op<decltype(gemm_glu_aux_cpu)>("tpkernels::gemm_glu_aux");
  if (needs_grad(x, w_gate, w_up, b_gate, b_up)) {
    return std::get<0>(aux.call(x, w_gate, w_up, b_gate, b_up, act));
  }
  at::AutoDispatchBelowAutograd below_autograd;
  return plain.call(x, w_gate, w_up, b_gate, b_up, act);
}
}  // namespace

void register_cpu_kernels(void (*raise)(const std::string& message)) {
  if (library) return;
  set_config_error(raise);
  library = new torch::Library(torch::Library::IMPL, "tpkernels", c10::DispatchKey::CPU, __FILE__,
                               __LINE__);
  library->impl("gemm_act", TORCH_FN(gemm_act_cpu));
  library->impl("gemm_act_aux", TORCH_FN(gemm_act_aux_cpu));
  library->impl("act_grad", TORCH_FN(act_grad_cpu));
  library->impl("gemm_dact", TORCH_FN(gemm_dact_cpu));
  library->impl("gemm_glu", TORCH_FN(gemm_glu_cpu));
  library->impl("gemm_glu_aux", TORCH_FN(gemm_glu_aux_cpu));
  library->impl("glu_grad", TORCH_FN(glu_grad_cpu));
  library->impl("gemm_dglu", TORCH_FN(gemm_dglu_cpu));
  autograd_library = new torch::Library(torch::Library::IMPL, "tpkernels",
                                        c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
  autograd_library->impl("gemm_act", TORCH_FN(gemm_act_autograd));
  autograd_library->impl("gemm_glu", TORCH_FN(gemm_glu_autograd));
}

void deregister_cpu_kernels() {
  delete autograd_library;
  delete library;
  autograd_library = library = nullptr;
}

}  // namespace tpkernels
