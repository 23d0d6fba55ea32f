#include "runtime.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/prefetch_scheduler.h"

namespace py = pybind11;

namespace tpkernels {
namespace {

using Pairs = std::vector<std::pair<int, int>>;

Pairs as_pairs(const PrefetchScheduler::Actions& actions) {
  Pairs pairs;
  pairs.reserve(actions.size());
  for (const Action& action : actions)
    pairs.emplace_back(static_cast<int>(action.kind), action.unit);
  return pairs;
}

// An event of the scheduler, its actions as (kind, unit).
template <typename... Args>
auto event(PrefetchScheduler::Actions (PrefetchScheduler::*method)(Args...)) {
  return [method](PrefetchScheduler& self, Args... args) {
    return as_pairs((self.*method)(std::forward<Args>(args)...));
  };
}

}  // namespace

void bind_runtime(py::module_& module) {
  using Scheduler = PrefetchScheduler;
  constexpr int64_t kUnlimited = Scheduler::kUnlimited;

  py::class_<UnitBytes>(module, "UnitBytes", "What one unit is charged, in bytes.")
      .def(py::init([](int64_t gathered, int64_t staging, int64_t gradients, int64_t reduce_input,
                       bool resident, bool held) {
             return UnitBytes{gathered, staging, gradients, reduce_input, resident, held};
           }),
           py::arg("gathered"), py::arg("staging") = 0, py::arg("gradients") = 0,
           py::arg("reduce_input") = 0, py::arg("resident") = false, py::arg("held") = false)
      .def_readonly("gathered", &UnitBytes::gathered)
      .def_readonly("staging", &UnitBytes::staging)
      .def_readonly("gradients", &UnitBytes::gradients)
      .def_readonly("reduce_input", &UnitBytes::reduce_input)
      .def_readonly("resident", &UnitBytes::resident)
      .def_readonly("held", &UnitBytes::held);

  py::class_<SchedulerCounters>(module, "Counters", "Totals since the start; bytes are peaks.")
      .def_readonly("gathers", &SchedulerCounters::gathers)
      .def_readonly("hits", &SchedulerCounters::hits)
      .def_readonly("misses", &SchedulerCounters::misses)
      .def_readonly("wasted", &SchedulerCounters::wasted)
      .def_readonly("peak_idle_bytes", &SchedulerCounters::peak_idle_bytes)
      .def_readonly("peak_live_bytes", &SchedulerCounters::peak_live_bytes)
      .def_readonly("peak_gathered_bytes", &SchedulerCounters::peak_gathered_bytes);

  py::class_<Scheduler> scheduler(
      module, "PrefetchScheduler",
      "tpkernels.reference.prefetch_scheduler.PrefetchScheduler, compiled; actions are (kind, "
      "unit).");
  scheduler.attr("implementation") = "native";
  scheduler
      .def(py::init<const std::vector<UnitBytes>&, int64_t, int64_t, int64_t, bool>(),
           py::arg("units"), py::arg("prefetch_bytes"), py::arg("max_live_bytes") = kUnlimited,
           py::arg("max_pending_reduces") = 2, py::arg("reshard_after_backward") = true)
      .def("begin_forward", event(&Scheduler::begin_forward), py::arg("mode"), py::arg("trains"))
      .def("end_forward", event(&Scheduler::end_forward))
      .def("begin_backward", event(&Scheduler::begin_backward))
      .def("end_backward", event(&Scheduler::end_backward))
      .def("use", event(&Scheduler::use), py::arg("index"), py::arg("record") = true)
      .def("release", event(&Scheduler::release), py::arg("index"))
      .def("collect", event(&Scheduler::collect), py::arg("index"))
      .def("reduce", event(&Scheduler::reduce), py::arg("index"))
      .def(
          "invalidate",
          [](Scheduler& self, const std::optional<std::vector<int64_t>>& indices) {
            return as_pairs(indices ? self.invalidate(*indices) : self.invalidate());
          },
          py::arg("indices") = py::none())
      .def("set_budget", event(&Scheduler::set_budget), py::arg("prefetch_bytes"),
           py::arg("max_live_bytes") = kUnlimited)
      .def("reset", event(&Scheduler::reset), py::arg("forget") = false)
      .def_property_readonly("idle_bytes", &Scheduler::idle_bytes)
      .def_property_readonly("gathered_bytes", &Scheduler::gathered_bytes)
      .def_property_readonly("live_bytes", &Scheduler::live_bytes)
      .def_property_readonly("counters", &Scheduler::counters,
                             py::return_value_policy::reference_internal)
      .def(
          "unit_counters",
          [](const Scheduler& self, int64_t index) {
            const UnitCounters counters = self.unit_counters(index);
            return std::tuple(counters.hits, counters.misses, counters.wasted);
          },
          py::arg("index"))
      .def("is_gathered", &Scheduler::is_gathered, py::arg("index"));
}

}  // namespace tpkernels
