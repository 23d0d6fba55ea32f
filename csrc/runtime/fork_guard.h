// Tells a forked child, such as a DataLoader's worker, from the process that made an object: it has
// a copy of the object's memory, and none of its threads.
#pragma once

#include <cstdint>

namespace tpkernels {

class ForkGuard {
 public:
  ForkGuard() : forks_(forks()) {}
  // Whether this process is a fork of the one that made this. No system call.
  bool forked() const { return forks_ != forks(); }

 private:
  static uint32_t forks();  // between this process and the one that loaded the library

  uint32_t forks_;
};

}  // namespace tpkernels
