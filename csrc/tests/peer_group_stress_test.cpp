// Peer groups with random delays between all that ranks do: several groups at once, overlapping and
// strided, several threads a rank, submitted and direct operations mixed, groups that end. Made to
// be run under ThreadSanitizer and AddressSanitizer as well.
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/group_calls.h"
#include "tests/processes.h"

namespace tpkernels::testing {
namespace {

// splitmix64, https://prng.di.unimi.it/splitmix64.c
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return next() % bound; }

 private:
  uint64_t state_;
};

// A thread's own delays: mostly none, often a yield, now and then a sleep.
void shake(Random& delays) {
  const uint64_t draw = delays.below(32);
  if (draw < 6) sched_yield();
  if (draw == 31) std::this_thread::sleep_for(std::chrono::microseconds(delays.below(300)));
}

uint64_t word_of(uint64_t seed, int step, int rank, size_t index) {
  return Random(seed + 1000003 * static_cast<uint64_t>(step) + static_cast<uint64_t>(rank)).next() +
         index;
}

// A random operation, the same on all ranks that give the same seed: of one to three steps, where
// all write and read, or only one writes, or only one reads.
void operate(PeerGroup& group, uint64_t seed, Random& delays) {
  Random shape(seed);
  const int world = group.world(), rank = group.rank();
  const size_t words = 1 + shape.below(600);
  const int steps = 1 + static_cast<int>(shape.below(3));
  const int root = static_cast<int>(shape.below(static_cast<uint64_t>(world)));
  const uint64_t kind = shape.below(4);  // 0: root writes, 1: root reads, else all do both
  const bool writes = kind != 0 || rank == root, reads = kind != 1 || rank == root;
  const bool one_by_one = shape.below(2) == 0;

  PeerGroup::Operation operation(group, signature_of(static_cast<int64_t>(words)));
  for (int step = 0; step < steps; ++step) {
    shake(delays);
    auto* const own = reinterpret_cast<uint64_t*>(operation.begin(words * sizeof(uint64_t)));
    for (size_t i = 0; writes && i < words; ++i) {
      own[i] = word_of(seed, step, rank, i);
      if (i == words / 2) shake(delays);
    }
    operation.publish();
    shake(delays);
    if (step == 0 || !one_by_one) operation.wait_all();
    if (!reads) continue;
    for (int peer = 0; peer < world; ++peer) {
      if (kind == 0 && peer != root) continue;
      operation.wait(peer);
      shake(delays);
      const auto* theirs = reinterpret_cast<const uint64_t*>(operation.slot(peer));
      for (size_t i = 0; i < words; ++i) {
        if (theirs[i] == word_of(seed, step, peer, i)) continue;
        throw std::runtime_error("step " + std::to_string(step) + ", word " + std::to_string(i) +
                                 " of rank " + std::to_string(peer) + " is wrong");
      }
    }
  }
  operation.finish();
}

// Groups of the ranks 0..3: members[g], and the view of each of them.
struct World {
  explicit World(std::vector<std::vector<int>> members) : members(std::move(members)) {
    for (const auto& ranks : this->members) {
      views.push_back(loopback_groups(static_cast<int>(ranks.size()), Seconds(30)));
    }
  }
  std::vector<std::vector<int>> members;
  std::vector<std::vector<Group>> views;

  // The view of `rank` in group `g`, or null.
  PeerGroup* view(size_t g, int rank) const {
    for (size_t i = 0; i < members[g].size(); ++i) {
      if (members[g][i] == rank) return views[g][i].get();
    }
    return nullptr;
  }
};

constexpr int kRanks = 4;
// All, halves, strides, an overlapping three, and one that two others share two ranks with.
const std::vector<std::vector<int>> kGroups = {{0, 1, 2, 3}, {0, 1},    {2, 3},   {0, 2},
                                               {1, 3},       {1, 2, 3}, {0, 3, 1}};

void check_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) CHECK(error.empty(), "%s", error.c_str());
}

TPK_TEST(a_thread_for_each_group_of_each_rank) {
  const World world(kGroups);
  std::vector<std::function<void()>> bodies;
  for (size_t g = 0; g < kGroups.size(); ++g) {
    for (const int rank : kGroups[g]) {
      bodies.push_back([&, g, rank] {
        Random delays(100 * g + static_cast<uint64_t>(rank));
        for (uint64_t i = 0; i < 60; ++i) operate(*world.view(g, rank), 1000 * g + i, delays);
      });
    }
  }
  check_none(at_once(bodies));
}

TPK_TEST(submitted_and_direct_operations_on_overlapping_groups) {
  const World world(kGroups);
  std::vector<std::function<void()>> bodies;
  for (int rank = 0; rank < kRanks; ++rank) {
    bodies.push_back([&world, rank] {
      Random order(7), delays(static_cast<uint64_t>(rank));  // the order is the same on all ranks
      std::atomic<int> failures{0};
      for (int i = 0; i < 250; ++i) {
        const size_t g = order.below(kGroups.size());
        const uint64_t seed = order.next();
        const bool submitted = order.below(3) != 0;
        PeerGroup* const group = world.view(g, rank);
        if (group == nullptr) continue;
        if (!submitted) {
          operate(*group, seed, delays);
          continue;
        }
        group->queue().submit([group, seed, &failures] {
          Random own_delays(seed + static_cast<uint64_t>(group->rank()));
          try {
            operate(*group, seed, own_delays);
          } catch (const std::exception& error) {
            ++failures;
            std::printf("submitted: %s\n", error.what());
          }
        });
        shake(delays);
      }
      for (size_t g = 0; g < kGroups.size(); ++g) {
        if (PeerGroup* const group = world.view(g, rank)) group->queue().drain();
      }
      if (failures != 0) throw std::runtime_error("a submitted operation failed");
    });
  }
  check_none(at_once(bodies));
}

TPK_TEST(several_threads_of_a_rank_take_turns_in_one_group) {
  // Whichever thread's turn it is: all do the same operation.
  auto groups = loopback_groups(3, Seconds(30));
  std::vector<std::function<void()>> bodies;
  for (const Group& group : groups) {
    for (int thread = 0; thread < 3; ++thread) {
      bodies.push_back([&group, thread] {
        Random delays(static_cast<uint64_t>(thread));
        for (int i = 0; i < 60; ++i) operate(*group, 5, delays);
      });
    }
  }
  check_none(at_once(bodies));
  for (const Group& group : groups) CHECK(group->operations() == 180, "of %d", group->rank());
}

TPK_TEST(a_group_that_is_ended_at_a_random_moment_ends_for_all) {
  for (uint64_t round = 0; round < 15; ++round) {
    auto groups = loopback_groups(3, Seconds(30));
    std::vector<std::function<void()>> bodies;
    for (const Group& group : groups) {
      bodies.push_back([&group, round] {
        Random delays(round + static_cast<uint64_t>(group->rank()));
        for (uint64_t i = 0;; ++i) operate(*group, i, delays);
      });
    }
    bodies.push_back([&groups, round] {
      Random random(round);
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(8000)));
      groups[random.below(3)]->abort("ended from outside");
    });
    const auto errors = at_once(bodies);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(says(errors[rank], "ended from outside"), "round %d: %s", static_cast<int>(round),
            errors[rank].c_str());
    }
  }
}

TPK_TEST(ranks_that_part_at_random_moments_are_told) {
  for (uint64_t round = 0; round < 10; ++round) {
    auto groups = loopback_groups(3, Seconds(30));
    const auto errors = on_threads(groups, [round](PeerGroup& group) {
      Random delays(round + static_cast<uint64_t>(group.rank()));
      const uint64_t parts = Random(round).below(20);
      for (uint64_t i = 0; i < 25; ++i) {
        operate(group, i == parts && group.rank() == 1 ? 12345 : i, delays);
      }
    });
    for (const std::string& error : errors)
      CHECK(says(error, "do different things"), "%s", error.c_str());
  }
}

TPK_TEST(a_rank_killed_at_a_random_moment_is_named) {
  for (uint64_t round = 0; round < 10; ++round) {
    const auto statuses = in_processes(3, [round](int rank, std::shared_ptr<PeerMemory> memory) {
      const Group group = group_of(std::move(memory), Seconds(60));
      const int victim = static_cast<int>(round % 3);
      if (rank == victim) {
        std::thread([round] {
          std::this_thread::sleep_for(std::chrono::microseconds(Random(round).below(15000)));
          kill(getpid(), SIGKILL);
        }).detach();
      }
      Random delays(round + static_cast<uint64_t>(rank));
      const std::string gone = "rank " + std::to_string(victim) + " (process ";
      auto last = Clock::now();
      try {
        for (uint64_t i = 0;; ++i) {
          last = Clock::now();
          operate(*group, i, delays);
        }
      } catch (const PeerError& error) {
        const bool soon = Seconds(Clock::now() - last).count() < 10;
        if (soon && says(error.what(), gone)) return 0;
        std::printf("rank %d: %s\n", rank, error.what());
        std::fflush(stdout);
      }
      return 2;
    });
    for (int rank = 0; rank < 3; ++rank) {
      const bool killed = rank == static_cast<int>(round % 3);
      CHECK(killed ? WIFSIGNALED(statuses[rank]) : statuses[rank] == 0, "round %d rank %d: %d",
            static_cast<int>(round), rank, statuses[rank]);
    }
  }
}

}  // namespace
}  // namespace tpkernels::testing
