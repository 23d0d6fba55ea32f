// tpkernels._C: what the native library tells Python about itself. Tensors do not pass through here
// but through torch.ops.tpkernels.*.
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <string>

#include "c10d.h"
#include "comm.h"
#include "cpu_table.h"
#include "kernels/epilogue_cpu.h"
#include "ops/interpreter.h"
#include "ops/register_cpu.h"
#include "runtime.h"
#include "runtime/interrupts.h"

namespace py = pybind11;

namespace {

// The kernels' failed checks as tpkernels.errors.ConfigError, as from every other implementation.
void raise_config_error(const std::string& message) {
  py::gil_scoped_acquire gil;
  const py::object error = py::module_::import("tpkernels.errors").attr("ConfigError");
  PyErr_SetString(error.ptr(), message.c_str());
  throw py::error_already_set();
}

// As tpkernels.errors.CommunicationError: see ops/interpreter.h.
void raise_communication_error(const std::string& message) {
  py::gil_scoped_acquire gil;
  const py::object error = py::module_::import("tpkernels.errors").attr("CommunicationError");
  PyErr_SetString(error.ptr(), message.c_str());
  throw py::error_already_set();
}

// See runtime/interrupts.h. Python runs its handlers on the first thread.
std::exception_ptr raised_by_signal() {
  if (syscall(SYS_gettid) != getpid() || !Py_IsInitialized()) return nullptr;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return nullptr;
  return std::make_exception_ptr(py::error_already_set());
}

void* release_interpreter() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }

void acquire_interpreter(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native kernels of tpkernels.";

  module.def(
      "build_info",
      [] {
        py::list isas;
        for (auto isa = tpkernels::epilogue_kernels_available(); *isa; ++isa) {
          isas.append((*isa)->isa);
        }
        py::dict info;
        info["compiler"] = __VERSION__;
        info["cxx_standard"] = __cplusplus;
        info["cpu_isa"] = tpkernels::epilogue_kernels().isa;
        info["cpu_isas"] = isas;
        return info;
      },
      "What this library was compiled with, and which instruction sets of it this processor runs, "
      "best first.");
  module.def(
      "register_cpu_kernels", [] { tpkernels::register_cpu_kernels(&raise_config_error); },
      "Put the CPU kernels under torch.ops.tpkernels.*; a second call does nothing.");
  module.def("deregister_cpu_kernels", &tpkernels::deregister_cpu_kernels,
             "Take the CPU kernels off again.");
  tpkernels::bind_cpu_table(module);

  tpkernels::set_interpreter(
      {&release_interpreter, &acquire_interpreter, &raise_communication_error});
  tpkernels::set_interrupt_check(&raised_by_signal);
  tpkernels::bind_runtime(module);
  tpkernels::bind_comm(module);
  tpkernels::bind_c10d(module);
}
