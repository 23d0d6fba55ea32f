// Exchanging the memory of two storages.
#pragma once

#include <ATen/core/Tensor.h>

namespace tpkernels {

// The storage of `a` gets the memory and size of that of `b`, and the other way round; views over
// either see it. No byte is copied and no version counter moves. Registered, when this library is
// loaded, as torch.ops.tpkernels.exchange_storage_ for every device.
void exchange_storage_(const at::Tensor& a, const at::Tensor& b);

}  // namespace tpkernels
