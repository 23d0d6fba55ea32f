// Which way the CPU's GEMMs go, for Python: csrc/ops/cpu_table.h.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels {

void bind_cpu_table(pybind11::module_& module);

}  // namespace tpkernels
