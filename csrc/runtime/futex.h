// To sleep until another thread or process that maps a word has changed it.
#pragma once

#include <atomic>
#include <cstdint>

namespace tpkernels {

enum class FutexWait {
  kChanged,  // it was woken, or the word is not `seen`
  kNothing   // after a while, or by a signal: a reason to look around
};

// Sleeps no longer than kLookAroundEvery (runtime/interrupts.h).
FutexWait futex_wait(std::atomic<uint32_t>& word, uint32_t seen);
void futex_wake(std::atomic<uint32_t>& word, int sleepers);

}  // namespace tpkernels
