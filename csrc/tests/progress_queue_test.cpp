// The queue of asynchronous operations: order, whoever does a work; and threads that are
// interrupted by a signal while they wait.
#include "runtime/progress_queue.h"

#include <atomic>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/interruptible_mutex.h"
#include "runtime/interrupts.h"
#include "tests/check.h"
#include "tests/group_calls.h"

namespace tpkernels::testing {
namespace {

TPK_TEST(works_are_done_one_at_a_time_in_order_by_whoever_waits) {
  ProgressQueue queue;
  constexpr int kWorks = 2000;
  std::atomic<int> done{0}, by_others{0}, inside{0};
  std::vector<std::thread> waiting;
  for (int i = 0; i < kWorks; ++i) {
    queue.submit([&, i] {
      CHECK(inside.fetch_add(1) == 0 && queue.is_within_work(), "work %d beside another", i);
      CHECK(done.load() == i, "work %d after %d", i, done.load());
      if (!queue.on_own_thread()) ++by_others;
      --inside;
      done = i + 1;
    });
    if (i % 500 == 0) {
      waiting.emplace_back([&, i] { queue.help_until([&] { return done > i + 300; }); });
    }
    if (i % 3 == 0) queue.help_until([&] { return done > i; });
  }
  queue.drain();
  CHECK(done == kWorks && queue.idle() && !queue.is_within_work(), "%d done", done.load());
  CHECK(by_others > 0, "no work was done by a thread that waited for it");
  for (std::thread& thread : waiting) thread.join();
}

TPK_TEST(waiting_for_a_work_is_not_waiting_for_later_ones) {
  ProgressQueue queue;
  std::atomic<bool> first{false}, last{false}, may_end{false};
  queue.submit([&] { first = true; });
  queue.help_until([&] { return first.load(); });
  queue.submit([&] {
    while (!may_end) std::this_thread::yield();
    last = true;
  });
  queue.help_until([&] { return first.load(); });
  CHECK(!last, "the last work ended before it could");
  may_end = true;
  queue.drain();
  CHECK(last, "drain() did not wait");
}

TPK_TEST(a_work_may_drain_and_stop_its_queue) {
  for (const bool helped : {false, true}) {
    std::atomic<int> done{0};
    ProgressQueue queue;
    queue.submit([&] {
      queue.drain();  // itself is not waited for
      queue.stop();
      ++done;
    });
    if (helped) {
      queue.help_until([&] { return done == 1; });
    } else {
      while (!queue.idle()) std::this_thread::yield();
    }
    queue.submit([&] { ++done; });  // by the caller
    CHECK(done == 2, "%d", done.load());
  }
}

// --- signals ---

std::atomic<std::thread::id> signalled;

// As python/module.cpp does it: of one thread, and once.
std::exception_ptr raised_by_signal() {
  std::thread::id expected = std::this_thread::get_id();
  if (!signalled.compare_exchange_strong(expected, std::thread::id())) return nullptr;
  return std::make_exception_ptr(std::runtime_error("stop"));
}

// What a handler raised through `body`, or "".
std::string raised_through(const std::function<void()>& body) {
  try {
    raising_causes(body);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

struct WithSignals {
  WithSignals() { set_interrupt_check(&raised_by_signal); }
  ~WithSignals() { set_interrupt_check(nullptr); }
};

TPK_TEST(a_signal_ends_the_wait_for_a_rank_and_the_group) {
  const WithSignals with_signals;
  auto groups = loopback_groups(2, Seconds(20));
  const auto began = Clock::now();
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    if (group.rank() == 1) {
      std::this_thread::sleep_for(Seconds(0.2));
      sum(group, 1);
      return;
    }
    signalled = std::this_thread::get_id();
    raising_causes([&] { sum(group, 1); });
  });
  CHECK(Seconds(Clock::now() - began).count() < 10, "it took too long");
  CHECK(errors[0] == "stop", "%s", errors[0].c_str());
  CHECK(errors[1].find("rank 0 was interrupted by a signal") != std::string::npos, "%s",
        errors[1].c_str());
}

TPK_TEST(a_signal_ends_the_wait_for_another_threads_work_which_goes_on) {
  const WithSignals with_signals;
  ProgressQueue queue;
  std::atomic<bool> begun{false}, may_end{false}, done{false};
  queue.submit([&] {
    begun = true;
    while (!may_end) std::this_thread::yield();
    done = true;
  });
  while (!begun) std::this_thread::yield();
  signalled = std::this_thread::get_id();
  const std::string raised = raised_through([&] { queue.drain(); });
  CHECK(raised == "stop" && !done, "%s", raised.c_str());
  may_end = true;
  queue.drain();
  CHECK(done, "the work was lost");
}

TPK_TEST(a_signal_ends_the_group_whoever_does_the_work) {
  const WithSignals with_signals;
  auto groups = loopback_groups(2, Seconds(20));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    if (group.rank() == 1) return;
    std::atomic<bool> begun{false};
    group.queue().submit([&] {
      begun = true;
      try {
        sum(group, 1);
      } catch (const PeerError&) {
      }
    });
    while (!begun) std::this_thread::yield();  // by the queue's own thread
    signalled = std::this_thread::get_id();
    const std::string raised = raised_through([&] { sum(group, 1); });
    const std::string reason = group.ended().value_or("");
    CHECK(raised == "stop", "%s", raised.c_str());
    CHECK(reason.find("rank 0 of group test was interrupted") != std::string::npos, "%s",
          reason.c_str());
    group.queue().drain();
  });
  for (const std::string& error : errors) CHECK(error.empty(), "%s", error.c_str());
}

TPK_TEST(a_signal_ends_the_wait_for_another_threads_turn) {
  const WithSignals with_signals;
  auto groups = loopback_groups(2, Seconds(20));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    if (group.rank() == 1) return;
    std::atomic<bool> begun{false};
    std::thread other([&] {
      try {
        const PeerGroup::Operation operation(group, signature_of(1));
        begun = true;
        std::this_thread::sleep_for(Seconds(0.3));
      } catch (const PeerError&) {
      }
    });
    while (!begun) std::this_thread::yield();
    signalled = std::this_thread::get_id();
    const auto began = Clock::now();
    const std::string raised = raised_through([&] { sum(group, 1); });
    CHECK(raised == "stop", "%s", raised.c_str());
    CHECK(Seconds(Clock::now() - began).count() < 0.25, "it waited for its turn");
    other.join();
  });
  for (const std::string& error : errors) CHECK(error.empty(), "%s", error.c_str());
}

TPK_TEST(a_wait_within_a_work_is_refused) {
  auto groups = loopback_groups(1, Seconds(20));
  std::string refused;
  groups[0]->queue().submit([&] {
    try {
      groups[0]->help_until([] { return false; });
    } catch (const PeerError& error) {
      refused = error.what();
    }
  });
  groups[0]->queue().drain();
  CHECK(refused.find("a signal handler calls a collective") != std::string::npos, "%s",
        refused.c_str());
}

TPK_TEST(threads_that_share_a_mutex_take_turns) {
  InterruptibleMutex mutex;
  int64_t count = 0;  // guarded by it
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 20000; ++turn) {
        const std::lock_guard lock(mutex);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(count == 80000, "%ld", static_cast<long>(count));
}

TPK_TEST(an_interrupted_work_is_done_with_and_the_next_one_follows) {
  auto groups = loopback_groups(1, Seconds(20));
  ProgressQueue& queue = groups[0]->queue();
  std::atomic<int> done{0};
  std::thread::id by;
  int interrupted = 0;
  for (int i = 0; i < 200; ++i) {
    queue.submit([&] {
      by = std::this_thread::get_id();
      ++done;
      if (!queue.on_own_thread()) {
        throw Interrupted{std::make_exception_ptr(std::runtime_error("stop"))};
      }
    });
    const int wanted = i + 1;
    try {
      queue.help_until([&] { return done == wanted; });
    } catch (const Interrupted&) {
      ++interrupted;
      CHECK(by == std::this_thread::get_id(), "somebody else's interrupt");
    }
  }
  queue.drain();
  CHECK(done == 200 && queue.idle(), "%d", done.load());
  CHECK(interrupted > 0, "no work was done by a thread that waited for it");
}

TPK_TEST(a_handler_that_calls_a_collective_is_refused) {
  static PeerGroup* group_of_handler = nullptr;
  auto groups = loopback_groups(2, Seconds(20));
  group_of_handler = groups[0].get();
  signalled = std::thread::id();
  set_interrupt_check([]() -> std::exception_ptr {
    try {
      sum(*group_of_handler, 1);
    } catch (const PeerError&) {
      return std::current_exception();
    }
    return nullptr;
  });
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    if (group.rank() == 1) return;
    raising_causes([&] { sum(group, 1); });
  });
  set_interrupt_check(nullptr);
  CHECK(errors[0].find("a signal handler calls a collective") != std::string::npos, "%s",
        errors[0].c_str());
}

}  // namespace
}  // namespace tpkernels::testing
