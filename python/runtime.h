// What has identity, for Python: csrc/runtime.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels {

void bind_runtime(pybind11::module_& module);

}  // namespace tpkernels
