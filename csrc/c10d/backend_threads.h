// The threads of a tpshm backend: its group's queue, and those on which futures are completed.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "runtime/fork_guard.h"
#include "runtime/peer_group.h"

namespace tpkernels {

class BackendThreads : public std::enable_shared_from_this<BackendThreads> {
 public:
  static std::shared_ptr<BackendThreads> of(const std::shared_ptr<PeerGroup>& group);

  // Has `work`, which must not throw, done on another thread. One after the other; beside it where
  // that one is busy, perhaps waiting for what comes next: callbacks are anybody's code. Once the
  // process exits, by the caller.
  void complete(std::function<void()> work);

  // Lets the group's queue end what it has to do, if need be by ending the group.
  void settle_group();
  // Before the interpreter goes: lets the threads of all backends come to an end. Those that do not
  // stay where they are (runtime/process_exit.h), and the peers are told.
  static void settle_all();
  // Whether this process has copies of them and no threads.
  bool forked() const { return made_here_.forked(); }

 private:
  explicit BackendThreads(const std::shared_ptr<PeerGroup>& group) : group_(group) {}

  bool idle() const;  // no future is being completed

  const std::weak_ptr<PeerGroup> group_;
  std::atomic<int> beside_{0};  // threads beside the queue's
  ForkGuard made_here_;
  ProgressQueue completions_;  // last: its thread ends before what it uses
};

}  // namespace tpkernels
