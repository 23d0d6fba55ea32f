#include "ops/exchange_storage.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <utility>

namespace tpkernels {

void exchange_storage_(const at::Tensor& a, const at::Tensor& b) {
  c10::StorageImpl* const first = a.storage().unsafeGetStorageImpl();
  c10::StorageImpl* const second = b.storage().unsafeGetStorageImpl();
  if (first == second) return;
  TORCH_CHECK_VALUE(first->device() == second->device(), "exchange_storage_: a is on ",
                    first->device(), ", b is on ", second->device(),
                    "; allowed: one device. Fix: b.to(a.device)");
  // Each must be able to grow, shrink and free what it gets.
  TORCH_CHECK_VALUE(first->resizable() && second->resizable(), "exchange_storage_: the storage of ",
                    first->resizable() ? "b" : "a",
                    " cannot be resized; allowed: storages that torch allocated. Fix: .clone()");
  TORCH_CHECK_VALUE(first->allocator() == second->allocator(),
                    "exchange_storage_: a and b are of different allocators; allowed: both pinned "
                    "or neither. Fix: allocate them alike");
  const size_t first_bytes = first->nbytes(), second_bytes = second->nbytes();
  c10::DataPtr memory = first->set_data_ptr(c10::DataPtr(nullptr, first->device()));
  first->set_data_ptr_noswap(second->set_data_ptr(std::move(memory)));
  first->set_nbytes(second_bytes);
  second->set_nbytes(first_bytes);
}

}  // namespace tpkernels

TORCH_LIBRARY_FRAGMENT(tpkernels, library) {
  library.def("exchange_storage_(Tensor(a!) a, Tensor(b!) b) -> ()");
  library.impl("exchange_storage_", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                                    TORCH_FN(tpkernels::exchange_storage_)));
}
