#include "runtime/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "runtime/interrupts.h"

namespace tpkernels {
namespace {

// Not FUTEX_PRIVATE_FLAG: a word may be shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr,
                 0);
}

}  // namespace

FutexWait futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec limit = {0, std::chrono::nanoseconds(kLookAroundEvery).count()};
  const long result = futex(word, FUTEX_WAIT, seen, &limit);
  return result == 0 || errno == EAGAIN ? FutexWait::kChanged : FutexWait::kNothing;
}

void futex_wake(std::atomic<uint32_t>& word, int sleepers) {
  futex(word, FUTEX_WAKE, static_cast<uint32_t>(sleepers), nullptr);
}

}  // namespace tpkernels
