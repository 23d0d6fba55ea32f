// Peer groups over both memories: steps, mismatches, absence, death, many groups.
#include "runtime/peer_group.h"

#include <signal.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/check.h"
#include "tests/group_calls.h"
#include "tests/processes.h"

namespace tpkernels::testing {
namespace {

TPK_TEST(threads_of_one_process_sum_for_any_world) {
  for (const int world : {1, 2, 3, 5, 8}) {
    auto groups = loopback_groups(world, Seconds(20));
    for (const std::string& error : on_threads(groups, [](PeerGroup& g) { sum_often(g, 300); })) {
      CHECK(error.empty(), "world %d: %s", world, error.c_str());
    }
  }
}

TPK_TEST(epochs_wrap) {
  auto groups = loopback_groups(3, Seconds(20), Epoch(0) - 50);
  for (const std::string& error : on_threads(groups, [](PeerGroup& g) { sum_often(g, 200); })) {
    CHECK(error.empty(), "%s", error.c_str());
  }
}

TPK_TEST(different_operations_raise_on_every_rank_and_name_both) {
  auto groups = loopback_groups(3, Seconds(20));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    sum(group, 1);
    sum(group, 1, group.rank() == 2 ? 5 : 4);
  });
  for (const std::string& error : errors) {
    CHECK(error.find("int64 [4]") != std::string::npos && error.find("[5]") != std::string::npos &&
              error.find("operation 2") != std::string::npos &&
              error.find("test") != std::string::npos,
          "%s", error.c_str());
  }
}

TPK_TEST(a_missing_rank_is_named_within_the_limit) {
  auto groups = loopback_groups(3, Seconds(0.3));
  const auto began = Clock::now();
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    if (group.rank() != 1) sum(group, 1);
  });
  const double seconds = Seconds(Clock::now() - began).count();
  CHECK(seconds > 0.29 && seconds < 3, "%g s", seconds);
  for (const int rank : {0, 2}) {
    CHECK(errors[rank].find("no arrival of rank 1 within 0.3 s") != std::string::npos, "%s",
          errors[rank].c_str());
  }
  // And the one that comes later is told, as is everyone who tries again.
  for (const std::string& error : on_threads(groups, [](PeerGroup& g) { sum(g, 1); })) {
    CHECK(error.find("no arrival of rank 1") != std::string::npos, "%s", error.c_str());
  }
}

TPK_TEST(the_limit_is_one_for_each_wait) {
  auto groups = loopback_groups(2, Seconds(0.6));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    PeerGroup::Operation operation(group, signature_of(2));
    for (int step = 0; step < 4; ++step) {
      if (group.rank() == 1) std::this_thread::sleep_for(Seconds(0.25));
      operation.begin(8);
      operation.publish();
      operation.wait_all();
    }
    operation.finish();
  });
  for (const std::string& error : errors) CHECK(error.empty(), "%s", error.c_str());
}

TPK_TEST(an_operation_left_by_an_error_ends_the_group) {
  auto groups = loopback_groups(2, Seconds(20));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    PeerGroup::Operation operation(group, signature_of(2));
    operation.begin(8);
    if (group.rank() == 0) throw std::runtime_error("bad");
    operation.publish();
    operation.wait_all();
    operation.finish();
  });
  CHECK(errors[0] == "bad", "%s", errors[0].c_str());
  CHECK(errors[1].find("rank 0 left it by an error") != std::string::npos, "%s", errors[1].c_str());
}

TPK_TEST(submitted_operations_come_before_later_ones) {
  auto groups = loopback_groups(2, Seconds(20));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    int64_t last = 0;
    for (int64_t i = 0; i < 50; ++i) {
      group.queue().submit([&group, &last, i] { last = sum(group, i, 3); });
    }
    const int64_t own = sum(group, 7);  // of another size: out of order would not match
    if (own != 14 || last != 98) throw PeerError("wrong order");
  });
  for (const std::string& error : errors) CHECK(error.empty(), "%s", error.c_str());
}

TPK_TEST(a_step_larger_than_a_slot_is_refused) {
  auto groups = loopback_groups(1, Seconds(1));
  const auto errors = on_threads(groups, [](PeerGroup& group) {
    PeerGroup::Operation operation(group, signature_of(2));
    operation.begin(PeerMemory::kSlotBytes + 1);
  });
  CHECK(errors[0].find("allowed: 33554432") != std::string::npos, "%s", errors[0].c_str());
}

TPK_TEST(processes_of_one_host_sum) {
  const auto statuses = in_processes(4, [](int, std::shared_ptr<PeerMemory> memory) {
    sum_often(*group_of(std::move(memory), Seconds(20)), 300);
    return 0;
  });
  for (const int status : statuses) CHECK(status == 0, "status %d", status);
}

TPK_TEST(a_killed_rank_is_named_long_before_the_limit) {
  const auto statuses = in_processes(3, [](int rank, std::shared_ptr<PeerMemory> memory) {
    const Group group = group_of(std::move(memory), Seconds(60));
    sum(*group, 1);
    if (rank == 1) kill(getpid(), SIGKILL);
    const auto began = Clock::now();
    try {
      sum(*group, 1);
    } catch (const PeerError& error) {
      const bool named = std::string(error.what()).find("rank 1") != std::string::npos;
      return named && Seconds(Clock::now() - began).count() < 5 ? 0 : 2;
    }
    return 3;
  });
  CHECK(WIFSIGNALED(statuses[1]), "status %d", statuses[1]);
  for (const int rank : {0, 2}) CHECK(statuses[rank] == 0, "status %d", statuses[rank]);
}

TPK_TEST(a_rank_that_left_in_good_order_is_named) {
  const auto statuses = in_processes(2, [](int rank, std::shared_ptr<PeerMemory> memory) {
    Group group = group_of(std::move(memory), Seconds(60));
    sum(*group, 1);
    if (rank == 1) return 0;
    try {
      sum(*group, 1);
    } catch (const PeerError& error) {
      return std::string(error.what()).find("has left the group") != std::string::npos ? 0 : 2;
    }
    return 3;
  });
  for (const int status : statuses) CHECK(status == 0, "status %d", status);
}

}  // namespace
}  // namespace tpkernels::testing
