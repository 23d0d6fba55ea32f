#include "ops/register_cpu.h"

#include <torch/library.h>

#include "ops/checks.h"
#include "ops/gemm_act_cpu.h"
#include "ops/gemm_glu_cpu.h"

namespace tpkernels {

namespace {
// Not destroyed at exit: by then the dispatcher may be gone.
torch::Library* library = nullptr;
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
}

void deregister_cpu_kernels() {
  delete library;
  library = nullptr;
}

}  // namespace tpkernels
