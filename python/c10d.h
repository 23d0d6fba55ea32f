// The `tpshm` backend of torch.distributed.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels {

void bind_c10d(pybind11::module_& module);

}  // namespace tpkernels
