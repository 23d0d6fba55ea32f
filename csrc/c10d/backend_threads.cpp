#include "c10d/backend_threads.h"

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tpkernels {
namespace {

// How long threads may take to end in good order. ASSUMPTION: what all ranks have begun is done by
// then; what some have not begun would not end by waiting.
constexpr Seconds kGrace{2.0};
constexpr std::chrono::microseconds kPoll{100};

bool becomes_true(const std::function<bool()>& condition) {
  const Clock::time_point began = Clock::now();
  while (!condition()) {
    if (Clock::now() - began > kGrace) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

bool becomes_idle(const ProgressQueue& queue) {
  return !queue.is_within_work() && becomes_true([&] { return queue.idle(); });
}

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<BackendThreads>> all;
};

Registry& registry() {
  static Registry* const instance = new Registry;  // not destroyed at exit: backends may end later
  return *instance;
}

}  // namespace

std::shared_ptr<BackendThreads> BackendThreads::of(const std::shared_ptr<PeerGroup>& group) {
  const std::shared_ptr<BackendThreads> made(new BackendThreads(group));
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().all, [](const auto& threads) { return threads.expired(); });
  registry().all.push_back(made);
  return made;
}

void BackendThreads::complete(std::function<void()> work) {
  auto task = [self = shared_from_this(), work = std::move(work)]() { work(); };
  if (completions_.idle()) return completions_.submit(std::move(task));
  ++beside_;
  std::thread([self = shared_from_this(), task = std::function<void()>(std::move(task))]() mutable {
    task();
    task = nullptr;  // what it holds is let go before it counts as done
    --self->beside_;
  }).detach();
}

void BackendThreads::settle_group() {
  if (made_here_.forked()) return;  // they run elsewhere
  if (const std::shared_ptr<PeerGroup> group = group_.lock();
      group && !becomes_idle(group->queue())) {
    group->abort("rank " + std::to_string(group->rank()) + " has left group " + group->name() +
                 " with operations under way. Fix: wait() for every operation before "
                 "destroy_process_group()");
    becomes_idle(group->queue());
  }
}

void BackendThreads::settle_all() {
  std::vector<std::weak_ptr<BackendThreads>> all;
  {
    std::lock_guard lock(registry().mutex);
    all = registry().all;
  }
  for (const auto& each : all) {
    const std::shared_ptr<BackendThreads> threads = each.lock();
    if (!threads || threads->made_here_.forked()) continue;
    threads->settle_group();
    becomes_true([&] { return threads->completions_.idle() && threads->beside_ == 0; });
  }
}

}  // namespace tpkernels
