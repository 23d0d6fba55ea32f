#include "comm.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "runtime/descriptor_passing.h"
#include "runtime/interrupts.h"
#include "runtime/peer_group.h"
#include "runtime/peer_groups.h"
#include "runtime/peer_memory.h"

namespace py = pybind11;

namespace tpkernels {
namespace {

// PeerError as tpkernels.errors.CommunicationError; what a signal's handler raised as it is.
void translate(std::exception_ptr raised) {
  try {
    if (raised) raising_causes([&] { std::rethrow_exception(raised); });
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const PeerError& error) {
    const py::object type = py::module_::import("tpkernels.errors").attr("CommunicationError");
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace

void bind_comm(py::module_& module) {
  using Memory = std::shared_ptr<PeerMemory>;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::register_local_exception_translator(&translate);

  py::class_<PeerMemory, Memory>(module, "PeerMemory",
                                 "One rank's view of the memory that the ranks of a group share.")
      .def_static("create", &PeerMemory::create, py::arg("rank"), py::arg("world"),
                  "New anonymous shared memory; raises CommunicationError.")
      .def_static(
          "take",
          [](const std::string& address, int rank, int world, double seconds) {
            return PeerMemory::attach(take_descriptor(address, Seconds(seconds)), rank, world);
          },
          py::arg("address"), py::arg("rank"), py::arg("world"), py::arg("seconds"), without_gil,
          "What the rank that made it offers at `address`.")
      .def_property_readonly_static("slot_bytes", [](py::object) { return PeerMemory::kSlotBytes; })
      .def_static("loopback", &PeerMemory::loopback, py::arg("world"),
                  "The views of `world` ranks that are threads of this process.");

  py::class_<DescriptorOffer>(module, "MemoryOffer", "Offers a PeerMemory to ranks of this host.")
      .def(py::init<>())
      .def_property_readonly("address", &DescriptorOffer::address)
      .def(
          "serve",
          [](DescriptorOffer& offer, const PeerMemory& memory, int takers, double seconds) {
            offer.serve(memory.descriptor(), takers, Seconds(seconds));
          },
          py::arg("memory"), py::arg("takers"), py::arg("seconds"), without_gil);

  py::class_<PeerGroup, std::shared_ptr<PeerGroup>>(
      module, "PeerGroup", "Ranks of one host that go through the same operations.")
      .def(py::init([](Memory memory, std::string name, std::vector<int64_t> global_ranks,
                       double timeout) {
             return std::make_shared<PeerGroup>(std::move(memory), std::move(name),
                                                std::move(global_ranks), Seconds(timeout));
           }),
           py::arg("memory"), py::arg("name"), py::arg("global_ranks"), py::arg("timeout"))
      .def_property_readonly("rank", &PeerGroup::rank)
      .def_property_readonly("world", &PeerGroup::world)
      .def_property_readonly("name", &PeerGroup::name)
      .def_property(
          "timeout", [](const PeerGroup& group) { return group.timeout().count(); },
          [](PeerGroup& group, double seconds) { group.set_timeout(Seconds(seconds)); })
      .def_property_readonly("operations", &PeerGroup::operations)
      .def_property_readonly("ended", &PeerGroup::ended)
      .def("abort", &PeerGroup::abort, py::arg("reason"));

  module.def("register_peer_group", &register_peer_group, py::arg("name"), py::arg("group"),
             "From now on ops find `group` under `name`.");
  module.def(
      "forget_peer_group",
      [](const std::string& name, const PeerGroup& group) { forget_peer_group(name, &group); },
      py::arg("name"), py::arg("group"));
  module.def("find_peer_group", &find_peer_group, py::arg("name"));
  module.def(
      "has_peer_group", [](const std::string& name) { return find_peer_group(name) != nullptr; },
      py::arg("name"));
}

}  // namespace tpkernels
