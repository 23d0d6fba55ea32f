#include "c10d.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "c10d/tpshm_backend.h"
#include "ops/peer_ops_cpu.h"

namespace py = pybind11;

namespace tpkernels {

// As torch holds its own backends: one that goes waits for threads, and they may want the GIL.
template <typename T>
class WithoutGil {
 public:
  WithoutGil() = default;
  explicit WithoutGil(T* pointer) : held_(c10::intrusive_ptr<T>::unsafe_steal_from_new(pointer)) {}
  WithoutGil(c10::intrusive_ptr<T> held) : held_(std::move(held)) {}
  WithoutGil(const WithoutGil&) = default;
  WithoutGil(WithoutGil&&) noexcept = default;
  WithoutGil& operator=(const WithoutGil&) = default;
  WithoutGil& operator=(WithoutGil&&) noexcept = default;
  ~WithoutGil() {
    if (!held_) return;
    if (PyGILState_Check()) {
      const py::gil_scoped_release released;
      held_.reset();
    } else {
      held_.reset();
    }
  }
  T* get() const { return held_.get(); }
  T* operator->() const { return held_.get(); }
  explicit operator bool() const { return static_cast<bool>(held_); }

 private:
  c10::intrusive_ptr<T> held_;
};

}  // namespace tpkernels

PYBIND11_DECLARE_HOLDER_TYPE(T, tpkernels::WithoutGil<T>, true)

namespace tpkernels {

void bind_c10d(py::module_& module) {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using Holder = WithoutGil<TpshmBackend>;

  module.attr("protocol_version") = kProtocolVersion;
  module.def(
      "all_reduce_",
      [](py::handle tensor, const c10d::ProcessGroup& group, std::string_view reduction) {
        return THPVariable_CheckExact(tensor.ptr()) &&
               all_reduce_contiguous(THPVariable_Unpack(tensor.ptr()), group.getGroupName(),
                                     reduction);
      },
      py::arg("tensor"), py::arg("group"), py::arg("reduction"),
      "tpkernels.comm.all_reduce_ at once; False, and nothing done, where that cannot be.");

  module.def("settle", &BackendThreads::settle_all, py::call_guard<py::gil_scoped_release>(),
             "Lets the threads of all tpshm groups end what they have to do; for the exit.");

  const py::module_ torch = py::module_::import("torch._C._distributed_c10d");  // the base class
  py::class_<TpshmBackend, Holder, c10d::Backend>(
      module, "TpshmBackend",
      "torch.distributed's backend over `group`, with `rest`, a Gloo backend, for what shared "
      "memory cannot do.")
      .def(py::init([](std::shared_ptr<PeerGroup> group, BackendPtr rest, std::string name,
                       std::vector<uint64_t> global_ranks) {
             return Holder(c10::make_intrusive<TpshmBackend>(
                 std::move(group), std::move(rest), std::move(name), std::move(global_ranks)));
           }),
           py::arg("group"), py::arg("rest"), py::arg("name"), py::arg("global_ranks"))
      .def_property_readonly(
          "options",
          [](TpshmBackend& backend) -> OptionsPtr { return backend.getBackendOptions(); })
      .def("_set_default_timeout", &TpshmBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace tpkernels
