// Peer memory and peer groups, as tpkernels/comm/peers.py makes them.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels {

void bind_comm(pybind11::module_& module);

}  // namespace tpkernels
