#include "runtime/interruptible_mutex.h"

#include "runtime/futex.h"
#include "runtime/interrupts.h"

namespace tpkernels {

// The third mutex of Ulrich Drepper, "Futexes are tricky" (2011): who has waited leaves it waited
// for, as others may.
void InterruptibleMutex::lock() {
  uint32_t expected = kFree;
  if (state_.compare_exchange_strong(expected, kTaken, std::memory_order_acquire)) return;
  while (state_.exchange(kWaitedFor, std::memory_order_acquire) != kFree) {
    if (futex_wait(state_, kWaitedFor) == FutexWait::kNothing) check_interrupt();
  }
}

void InterruptibleMutex::unlock() {
  if (state_.exchange(kFree, std::memory_order_release) == kWaitedFor) futex_wake(state_, 1);
}

}  // namespace tpkernels
