// A flag that one rank raises and others wait for: they look at it for a while, then sleep.
//
// Nobody sleeps through a raise. The one who waits counts itself among the sleepers and then looks
// at the flag once more; the one who raises stores the flag and then looks at the sleepers. All
// four are sequentially consistent, so at least one of them sees the other's store. (The kernel
// looks at the flag a last time itself: it does not let anyone sleep on a value that has changed.)
#pragma once

#include <atomic>
#include <cstdint>

#include "common/epoch.h"

namespace tpkernels {

// In memory that all ranks map. Two cache lines: processors fetch lines in pairs.
struct alignas(128) SleepingFlag {
  std::atomic<Epoch> epoch{0};
  std::atomic<uint32_t> sleepers{0};
};
static_assert(std::atomic<Epoch>::is_always_lock_free);

// System: wake(word) lets all who sleep on the word go on.
template <class Flag, class System>
void raise(Flag& flag, Epoch epoch, System& system) {
  flag.epoch.store(epoch, std::memory_order_seq_cst);  // releases what was written before
  if (flag.sleepers.load(std::memory_order_seq_cst) != 0) system.wake(flag.epoch);
}

// System: look_again(attempt) says whether to look once more before sleeping, after a pause;
// sleep(word, seen) returns at a wake, after a while, or at once if the word is not `seen` any
// more, and throws when it is time to give up.
template <class Flag, class System>
void wait_for(Flag& flag, Epoch wanted, System& system) {
  uint32_t attempt = 0;
  do {
    if (reached(flag.epoch.load(std::memory_order_acquire), wanted)) return;
  } while (system.look_again(attempt++));

  struct Sleeper {
    explicit Sleeper(Flag& flag) : flag(flag) {
      flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() { flag.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
    Flag& flag;
  } sleeper(flag);
  for (;;) {
    const Epoch seen = flag.epoch.load(std::memory_order_seq_cst);
    if (reached(seen, wanted)) return;
    system.sleep(flag.epoch, seen);
  }
}

}  // namespace tpkernels
