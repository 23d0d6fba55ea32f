// Work that is done in order, one after the other: the asynchronous operations of one group. A
// thread of the queue's own does it, or whoever waits for it: to hand a small operation over to a
// thread and its end back takes longer than the operation.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "runtime/fork_guard.h"

namespace tpkernels {

class ProgressQueue {
 public:
  using Work = std::function<void()>;

  ProgressQueue();
  ~ProgressQueue() { stop(); }
  ProgressQueue(const ProgressQueue&) = delete;

  // The thread starts with the first one. `work` may throw Interrupted and nothing else.
  void submit(Work work);
  // Does what is in front, or waits while another thread does, until `is_done`, which the end of a
  // work brings about. Throws Interrupted. Not from within a work.
  void help_until(const std::function<bool()>& is_done);
  // All that was submitted before. Returns at once within a work.
  void drain();
  // Has what was submitted done, and ends the thread. Later submissions are done by the caller, as
  // they are once the process exits. In a forked child, which has no such thread, it only lets go.
  void stop();

  // Whether nothing is waiting or in progress.
  bool idle() const;
  // Whether this thread is doing one of the works.
  bool is_within_work() const;
  // Whether this thread is the queue's own.
  bool on_own_thread() const;

 private:
  struct State;  // the thread's too: a work may let the queue itself go
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
  ForkGuard made_here_;
};

}  // namespace tpkernels
