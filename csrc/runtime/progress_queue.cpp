#include "runtime/progress_queue.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace tpkernels {

struct ProgressQueue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> works;
  bool stopping = false;
  std::atomic<int64_t> pending{0};  // waiting or in progress
  std::atomic<std::thread::id> thread_id{};
};

ProgressQueue::ProgressQueue() : state_(std::make_shared<State>()) {}

bool ProgressQueue::idle() const { return state_->pending.load(std::memory_order_acquire) == 0; }

bool ProgressQueue::on_own_thread() const {
  return std::this_thread::get_id() == state_->thread_id.load(std::memory_order_relaxed);
}

void ProgressQueue::submit(std::function<void()> work) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.stopping) {
    lock.unlock();
    work();
    return;
  }
  if (!thread_.joinable()) thread_ = std::thread(&ProgressQueue::run, state_);  // may throw
  state.works.push_back(std::move(work));
  state.pending.fetch_add(1, std::memory_order_acq_rel);
  state.changed.notify_all();
}

void ProgressQueue::drain() {
  if (idle() || on_own_thread()) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return idle(); });
}

void ProgressQueue::stop() {
  if (made_here_.forked()) {
    // Nobody runs here whom the handle could mean, and the lock may be held for ever. A handle that
    // is neither joined nor detached must not be destroyed.
    static auto* const strays = new std::vector<std::thread>;
    strays->push_back(std::move(thread_));
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  if (!thread_.joinable()) return;
  if (on_own_thread()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void ProgressQueue::run(const std::shared_ptr<State>& shared) {
  const std::shared_ptr<State> keep = shared;
  State& state = *keep;
  state.thread_id.store(std::this_thread::get_id(), std::memory_order_relaxed);
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return state.stopping || !state.works.empty(); });
    if (state.works.empty()) return;
    std::function<void()> work = std::move(state.works.front());
    state.works.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds is let go before it counts as done
    lock.lock();
    if (state.pending.fetch_sub(1, std::memory_order_acq_rel) == 1) state.changed.notify_all();
  }
}

}  // namespace tpkernels
