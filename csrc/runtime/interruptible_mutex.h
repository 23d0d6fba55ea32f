// A mutex that a thread which waits for it leaves when a signal's handler raises.
#pragma once

#include <atomic>
#include <cstdint>

namespace tpkernels {

class InterruptibleMutex {
 public:
  // Throws Interrupted, unlocked.
  void lock();
  void unlock();

 private:
  enum State : uint32_t { kFree, kTaken, kWaitedFor };

  std::atomic<uint32_t> state_{kFree};
};

}  // namespace tpkernels
