// Work that a thread of its own does in order: the asynchronous operations of one group.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime/fork_guard.h"

namespace tpkernels {

class ProgressQueue {
 public:
  ProgressQueue();
  ~ProgressQueue() { stop(); }
  ProgressQueue(const ProgressQueue&) = delete;

  // The thread starts with the first one. `work` must not throw.
  void submit(std::function<void()> work);
  // Until all that was submitted before is done. Returns at once on the queue's own thread.
  void drain();
  // Does what was submitted, and ends the thread. Later submissions are done by the caller. In a
  // forked child, which has no such thread, it only lets go.
  void stop();
  // Whether nothing is waiting or in progress.
  bool idle() const;
  bool on_own_thread() const;

 private:
  struct State;  // the thread's too: a work may let the queue itself go
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
  ForkGuard made_here_;
};

}  // namespace tpkernels
