// The scheduler's main scenarios, action by action; any history, against the Python specification,
// is driven by tests/zero/test_scheduler.py.
#include "runtime/prefetch_scheduler.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/check.h"

namespace tpkernels {
namespace {

using Actions = PrefetchScheduler::Actions;

constexpr int64_t kUnlimited = PrefetchScheduler::kUnlimited;

std::vector<UnitBytes> equal_units(int count, UnitBytes bytes = {.gathered = 10}) {
  return std::vector<UnitBytes>(static_cast<size_t>(count), bytes);
}

// "gather 0, wait 0": as CHECK prints and compares actions.
std::string text(const Actions& actions) {
  constexpr const char* kNames[] = {"gather", "wait", "free", "reduce", "wait_reduce"};
  std::string out;
  for (const Action& action : actions) {
    if (!out.empty()) out += ", ";
    out += kNames[static_cast<int>(action.kind)];
    out += ' ';
    out += std::to_string(action.unit);
  }
  return out;
}

void expect(const Actions& actions, const std::string& expected) {
  const std::string given = text(actions);
  CHECK(given == expected, "'%s', not '%s'", given.c_str(), expected.c_str());
}

void forward(PrefetchScheduler& scheduler, const std::vector<int>& order, bool trains = true) {
  scheduler.begin_forward(trains ? "train" : "eval", trains);
  for (const int unit : order) {
    scheduler.use(unit);
    scheduler.release(unit);
  }
  scheduler.end_forward();
}

void backward(PrefetchScheduler& scheduler, const std::vector<int>& order) {
  scheduler.begin_backward();
  for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
    scheduler.use(*unit);
    scheduler.collect(*unit);
    scheduler.release(*unit);
    scheduler.reduce(*unit);
  }
  scheduler.end_backward();
}

void step(PrefetchScheduler& scheduler, const std::vector<int>& order) {
  forward(scheduler, order);
  backward(scheduler, order);
}

template <typename Call>
void expect_refused(Call call, const std::string& words) {
  std::string message = "nothing was thrown";
  try {
    call();
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find(words) != std::string::npos, "'%s' has no '%s'", message.c_str(),
        words.c_str());
}

}  // namespace

TPK_TEST(scheduler_first_forward_follows_the_order_of_units) {
  PrefetchScheduler scheduler(equal_units(3), 10);
  expect(scheduler.begin_forward("train", true), "gather 0");
  expect(scheduler.use(0), "gather 1, wait 0");
  expect(scheduler.release(0), "free 0");
  expect(scheduler.use(1), "gather 2, wait 1");
  expect(scheduler.release(1), "free 1");
  expect(scheduler.use(2), "wait 2");
  expect(scheduler.release(2), "");  // backward needs it first
  expect(scheduler.end_forward(), "");
  expect(scheduler.begin_backward(), "");
  expect(scheduler.use(2), "gather 1");
  expect(scheduler.release(2), "free 2");
  CHECK(scheduler.counters().misses == 0, "%lld", (long long)scheduler.counters().misses);
  CHECK(scheduler.counters().peak_idle_bytes == 10, "%lld",
        (long long)scheduler.counters().peak_idle_bytes);
}

TPK_TEST(scheduler_learns_an_order) {
  PrefetchScheduler scheduler(equal_units(6), 20);
  const std::vector<int> order{4, 1, 1, 5, 0};
  step(scheduler, order);
  const SchedulerCounters before = scheduler.counters();
  step(scheduler, order);
  CHECK(scheduler.counters().misses == before.misses, "a miss in the second step");
  CHECK(scheduler.counters().wasted == before.wasted, "a wasted gather in the second step");
}

TPK_TEST(scheduler_follows_branches_that_alternate) {
  PrefetchScheduler scheduler(equal_units(6), 20);
  const std::vector<int> branches[] = {{0, 1, 2, 5}, {0, 3, 4, 5}};
  for (int i = 0; i < 4; ++i) step(scheduler, branches[i % 2]);
  const SchedulerCounters before = scheduler.counters();
  for (int i = 0; i < 6; ++i) step(scheduler, branches[i % 2]);
  CHECK(scheduler.counters().misses == before.misses, "a miss");
  CHECK(scheduler.counters().wasted == before.wasted, "a wasted gather");
}

TPK_TEST(scheduler_stays_with_an_order_that_stays) {
  PrefetchScheduler scheduler(equal_units(4), 10);
  const std::vector<int> orders[] = {{0, 1, 2, 3}, {3, 1, 0, 2}};
  for (const int run : {0, 1, 0, 1}) {
    step(scheduler, orders[run]);  // the change itself may miss
    const SchedulerCounters before = scheduler.counters();
    for (int i = 0; i < 2; ++i) step(scheduler, orders[run]);
    CHECK(scheduler.counters().misses == before.misses, "a miss in a later step of a run");
    CHECK(scheduler.counters().wasted == before.wasted, "a wasted gather");
  }
}

TPK_TEST(scheduler_drops_stale_copies) {
  PrefetchScheduler scheduler(equal_units(2), kUnlimited);
  expect(scheduler.begin_forward("train", true), "gather 0, gather 1");
  expect(scheduler.use(0), "wait 0");
  expect(scheduler.invalidate(), "wait 1, free 1");
  expect(scheduler.release(0), "free 0, gather 1, gather 0");
  expect(scheduler.invalidate({1}), "wait 1, free 1");
}

TPK_TEST(scheduler_residents_stay_until_the_weights_change) {
  PrefetchScheduler scheduler(equal_units(2, {.gathered = 10, .staging = 5, .resident = true}), 30);
  expect(scheduler.begin_forward("eval", false), "gather 0, gather 1");
  expect(scheduler.use(0), "wait 0");
  expect(scheduler.release(0), "");
  expect(scheduler.end_forward(), "wait 1");
  CHECK(scheduler.live_bytes() == 20 && scheduler.idle_bytes() == 0, "%lld live, %lld idle",
        (long long)scheduler.live_bytes(), (long long)scheduler.idle_bytes());
  expect(scheduler.invalidate(), "");
  expect(scheduler.begin_forward("eval", false), "gather 0");  // into the same memory
  CHECK(scheduler.live_bytes() == 25, "%lld", (long long)scheduler.live_bytes());
}

TPK_TEST(scheduler_reduces_within_the_live_bound) {
  PrefetchScheduler scheduler(equal_units(3, {.gathered = 10, .gradients = 20, .reduce_input = 5}),
                              0, /*max_live_bytes=*/60);
  scheduler.begin_backward();
  scheduler.collect(2);
  expect(scheduler.reduce(2), "reduce 2");
  expect(scheduler.collect(1), "");
  expect(scheduler.reduce(1), "reduce 1");
  expect(scheduler.use(0), "gather 0, wait 0");
  expect(scheduler.collect(0), "wait_reduce 2");
  expect(scheduler.end_backward(), "wait_reduce 1");
  CHECK(scheduler.counters().peak_live_bytes == 60, "%lld",
        (long long)scheduler.counters().peak_live_bytes);
}

TPK_TEST(scheduler_reset_leaves_nothing) {
  PrefetchScheduler scheduler(equal_units(4, {.gathered = 10, .gradients = 10}), 20);
  forward(scheduler, {0, 1, 2, 3});
  scheduler.begin_backward();
  scheduler.use(3);
  scheduler.collect(3);
  scheduler.reduce(3);
  expect(scheduler.reset(), "wait_reduce 3, wait 1, free 1, free 2, free 3");
  CHECK(scheduler.live_bytes() == 0, "%lld", (long long)scheduler.live_bytes());
  step(scheduler, {0, 1, 2, 3});
  CHECK(scheduler.live_bytes() == 0, "%lld", (long long)scheduler.live_bytes());
}

TPK_TEST(scheduler_refuses_what_cannot_be) {
  expect_refused([] { PrefetchScheduler({{.gathered = -1}}, 0); }, "units[0].gathered is -1");
  expect_refused([] { PrefetchScheduler({{kUnlimited}, {kUnlimited}}, 0); }, "2**62 bytes");
  expect_refused([] { PrefetchScheduler({}, -1); }, "prefetch_bytes is -1");
  expect_refused([] { PrefetchScheduler({}, 0, std::numeric_limits<int64_t>::max()); },
                 "max_live_bytes is 9223372036854775807");
  expect_refused([] { PrefetchScheduler({}, 0, 0, -1); }, "max_pending_reduces is -1");
  PrefetchScheduler scheduler(equal_units(1), 0);
  expect_refused([&] { scheduler.use(1); }, "unit 1 is unknown, there are 1");
  expect_refused([&] { scheduler.invalidate({-1}); }, "unit -1 is unknown");
  expect_refused([&] { scheduler.release(0); }, "released more often than used");
  expect_refused([&] { scheduler.reduce(0); }, "collected no gradients");
}

// A long history of all events, for the sanitizers and the sums that are kept up to date.
TPK_TEST(scheduler_sums_agree_after_any_history) {
  uint32_t state = 1;
  const auto draw = [&state](uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((state >> 16) % below);
  };
  std::vector<UnitBytes> units(7);
  for (UnitBytes& unit : units) {
    unit = {draw(9), draw(3), draw(9), draw(3), draw(4) == 0, draw(4) == 0};
  }
  PrefetchScheduler scheduler(units, 12, 60);
  std::vector<int> uses(units.size());
  for (int event = 0; event < 20000; ++event) {
    const int unit = draw(7);
    switch (draw(12)) {
      case 0:
        scheduler.begin_forward(draw(2) ? "train" : "eval", draw(2));
        break;
      case 1:
        scheduler.end_forward();
        break;
      case 2:
        scheduler.begin_backward();
        break;
      case 3:
        scheduler.end_backward();
        break;
      case 4:
        scheduler.invalidate({unit});
        break;
      case 5:
        scheduler.set_budget(draw(30), draw(60));
        break;
      case 6:
        scheduler.collect(unit);
        scheduler.reduce(unit);
        break;
      default:
        if (uses[unit] && draw(2)) {
          --uses[unit];
          scheduler.release(unit);
        } else {
          ++uses[unit];
          scheduler.use(unit, draw(3) > 0);
        }
    }
    if (draw(200) == 0) {
      scheduler.reset();
      std::fill(uses.begin(), uses.end(), 0);
      int64_t residents = 0;
      for (int i = 0; i < 7; ++i) residents += scheduler.is_gathered(i) ? units[i].gathered : 0;
      CHECK(scheduler.idle_bytes() == 0, "%lld idle", (long long)scheduler.idle_bytes());
      CHECK(scheduler.live_bytes() == residents, "%lld live, %lld of residents",
            (long long)scheduler.live_bytes(), (long long)residents);
    }
  }
}

}  // namespace tpkernels
