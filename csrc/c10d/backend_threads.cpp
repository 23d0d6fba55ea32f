#include "c10d/backend_threads.h"

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/process_exit.h"

namespace tpkernels {
namespace {

// How long threads may take to end in good order. ASSUMPTION: what all ranks have begun is done by
// then; what some have not begun would not end by waiting.
constexpr std::chrono::seconds kGrace{2};
constexpr std::chrono::microseconds kPoll{100};
// And those that have just ended their wait, to come back to the interpreter while it is there.
constexpr std::chrono::milliseconds kComingBack{2};

template <class Condition>
bool becomes_true(const Condition& condition, Clock::time_point limit = Clock::now() + kGrace) {
  while (!condition()) {
    if (Clock::now() > limit) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

void end(PeerGroup& group) {
  group.abort("rank " + std::to_string(group.rank()) + " has left group " + group.name() +
              " with operations under way. Fix: wait() for every operation before "
              "destroy_process_group()");
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
  if (process_exits()) return work();  // its threads stay where they are
  auto task = [self = shared_from_this(), work = std::move(work)]() {
    stay_if_process_exits();
    work();
  };
  if (completions_.idle()) return completions_.submit(std::move(task));
  ++beside_;
  std::thread([self = shared_from_this(), task = std::function<void()>(std::move(task))]() mutable {
    task();
    task = nullptr;  // what it holds is let go before it counts as done
    --self->beside_;
  }).detach();
}

void BackendThreads::settle_group() {
  const std::shared_ptr<PeerGroup> group = group_.lock();
  if (!group || forked() || process_exits() || group->queue().is_within_work()) return;
  const auto idle = [&] { return group->queue().idle(); };
  if (becomes_true(idle)) return;
  end(*group);
  becomes_true(idle);
}

void BackendThreads::settle_all() {
  std::vector<std::weak_ptr<BackendThreads>> registered;
  {
    std::lock_guard lock(registry().mutex);
    registered = registry().all;
  }
  std::vector<std::shared_ptr<BackendThreads>> all;
  for (const auto& each : registered) {
    const std::shared_ptr<BackendThreads> threads = each.lock();
    if (threads && !threads->forked()) all.push_back(threads);
  }
  const Clock::time_point limit = Clock::now() + kGrace;
  for (const auto& threads : all) {
    const std::shared_ptr<PeerGroup> group = threads->group_.lock();
    becomes_true([&] { return (!group || group->idle()) && threads->idle(); }, limit);
  }
  begin_process_exit();
  for (const auto& threads : all) {
    const std::shared_ptr<PeerGroup> group = threads->group_.lock();
    if (group && !group->idle()) end(*group);
  }
  std::this_thread::sleep_for(kComingBack);
}

bool BackendThreads::idle() const { return completions_.idle() && beside_ == 0; }

}  // namespace tpkernels
