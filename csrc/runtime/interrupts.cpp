#include "runtime/interrupts.h"

#include <utility>

namespace tpkernels {
namespace {
std::exception_ptr (*check)() = nullptr;
}  // namespace

void set_interrupt_check(std::exception_ptr (*new_check)()) { check = new_check; }

void check_interrupt() {
  if (check == nullptr) return;
  if (std::exception_ptr cause = check()) throw Interrupted{std::move(cause)};
}

}  // namespace tpkernels
