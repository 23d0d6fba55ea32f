// Putting the CPU kernels under torch.ops.tpkernels.*, and taking them off again.
#pragma once

#include <string>

namespace tpkernels {

// Registers a CPU kernel for each op; the ops' schemas are defined in Python. Failed argument
// checks call `raise`, which must throw. Once registered, a second call does nothing. Not to be
// called from two threads at once.
void register_cpu_kernels(void (*raise)(const std::string& message));

// Takes the CPU kernels off: the ops fall back to what Python registered for every device.
void deregister_cpu_kernels();

}  // namespace tpkernels
