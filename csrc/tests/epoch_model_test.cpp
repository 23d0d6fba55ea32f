// Every schedule of the protocol for 2 and 3 ranks and 3 operations, and of the protocol with one
// thing broken: see epoch_model.h for what is searched, epoch_model_rank.h for what is broken.
#include "tests/epoch_model.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/epoch_model_rank.h"

namespace tpkernels::model {
namespace {

// What collectives do, step by step: those in which everybody waits for everybody, those in which
// a root runs ahead (broadcast) and those in which the others do (gather).
enum Operation { kAllReduce, kTwoSteps, kPipelined, kBroadcast, kGather, kOneByOne, kBarrier };
constexpr const char* kNames[] = {"all-reduce", "two steps",  "pipelined", "broadcast",
                                  "gather",     "one by one", "barrier"};

void all_with_all(ModelRank& self) {
  self.begin();
  self.write();
  self.publish();
  self.wait_all();
  for (int peer = 0; peer < self.world(); ++peer) self.read(peer);
}

void run(Operation operation, ModelRank& self) {
  constexpr int kRoot = 0;
  switch (operation) {
    case kAllReduce:
      return all_with_all(self);
    case kTwoSteps:
      all_with_all(self);
      return all_with_all(self);
    case kPipelined:  // the second step begins before the first one's slots are read
      self.begin();
      self.write();
      self.publish();
      self.wait_all();
      self.begin();
      self.write();
      if (self.fault().reads_the_step_before_too_late) self.publish();
      for (int peer = 0; peer < self.world(); ++peer) self.read_step_before(peer);
      if (!self.fault().reads_the_step_before_too_late) self.publish();
      self.wait_all();
      for (int peer = 0; peer < self.world(); ++peer) self.read(peer);
      return;
    case kBroadcast:
      self.begin();
      if (self.rank() == kRoot) self.write();
      self.publish();
      if (self.rank() == kRoot) return;
      self.wait(kRoot);
      return self.read(kRoot);
    case kGather:
      self.begin();
      self.write();
      self.publish();
      if (self.rank() != kRoot) return;
      self.wait_all();
      for (int peer = 0; peer < self.world(); ++peer) self.read(peer);
      return;
    case kOneByOne:
      self.begin();
      self.write();
      self.publish();
      for (int peer = 0; peer < self.world(); ++peer) {
        self.wait(peer);
        self.read(peer);
      }
      return;
    case kBarrier:
      self.begin();
      self.publish();
      return self.wait_all();
  }
}

struct Case {
  int world;
  std::vector<Operation> operations;
  Fault fault = {};
  SearchOptions options = {};
  Epoch start = 0;
  uint32_t looks = 1;  // at a flag before sleeping

  std::string text() const {
    std::string text = std::to_string(world) + " ranks:";
    for (const Operation operation : operations)
      text += std::string(" [") + kNames[operation] + "]";
    return text;
  }
};

SearchResult explore(const Case& what) {
  std::vector<Program> programs;
  for (int rank = 0; rank < what.world; ++rank) {
    programs.push_back([&what, rank](Replay& replay) {
      ModelRank self(replay, rank, what.world, what.fault, what.start, what.looks);
      for (const Operation operation : what.operations) run(operation, self);
    });
  }
  return search(programs, what.options);
}

class Clock {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// All of `cases` are right; says how much was searched.
void prove(const char* what, const std::vector<Case>& cases) {
  const Clock clock;
  uint64_t states = 0, most = 0;
  for (const Case& one : cases) {
    const SearchResult result = explore(one);
    CHECK(result.error.empty(), "%s: %s\n%s", one.text().c_str(), result.error.c_str(),
          result.schedule.c_str());
    states += result.states;
    most = std::max(most, result.states);
  }
  std::printf("       %s: %zu programs, %llu states (at most %llu in one), %.1f s\n", what,
              cases.size(), static_cast<unsigned long long>(states),
              static_cast<unsigned long long>(most), clock.seconds());
}

std::vector<std::vector<Operation>> all_triples(const std::vector<Operation>& of) {
  std::vector<std::vector<Operation>> triples;
  for (const Operation a : of) {
    for (const Operation b : of) {
      for (const Operation c : of) triples.push_back({a, b, c});
    }
  }
  return triples;
}

TPK_TEST(every_schedule_of_2_ranks_is_right) {
  std::vector<Case> cases;
  for (auto& triple :
       all_triples({kAllReduce, kTwoSteps, kPipelined, kBroadcast, kGather, kOneByOne, kBarrier})) {
    cases.push_back({.world = 2, .operations = triple, .looks = 2});
  }
  prove("2 ranks", cases);
}

TPK_TEST(every_schedule_of_3_ranks_is_right) {
  constexpr SearchOptions kReduced = {.reduced = true};
  std::vector<Case> cases;
  for (auto& triple : all_triples({kAllReduce, kBroadcast, kGather})) {
    cases.push_back({.world = 3, .operations = triple, .options = kReduced});
  }
  prove("3 ranks", cases);
  prove("3 ranks, operations of two steps",
        {{.world = 3, .operations = {kTwoSteps, kGather, kBroadcast}, .options = kReduced},
         {.world = 3, .operations = {kBroadcast, kPipelined, kGather}, .options = kReduced}});
  prove("3 ranks, every order of every access",
        {{.world = 3, .operations = {kAllReduce}},
         {.world = 3, .operations = {kBroadcast, kGather}}});
}

TPK_TEST(every_schedule_is_right_where_epochs_wrap) {
  std::vector<Case> cases;
  for (const Epoch before : {1u, 2u, 3u}) {
    cases.push_back({.world = 2,
                     .operations = {kAllReduce, kBroadcast, kTwoSteps},
                     .start = Epoch(0) - before});
  }
  prove("wrapping", cases);
}

// How a fault shows: a slot is read or written too early, or somebody sleeps for ever.
bool shows(const std::string& error, bool unsafe) {
  const auto says = [&](const char* text) { return error.find(text) != std::string::npos; };
  if (unsafe) return says("a race") || says("reads what was written for step");
  return says("nobody is left to wake them");
}

struct Planted {
  const char* name;
  Fault fault;
  bool unsafe;
  int world = 2;
  Operation operation = kAllReduce;
  size_t times = 3;
  bool wakes_one = false;
};

TPK_TEST(every_planted_fault_is_found) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const std::vector<Planted> faults = {
      {"begin() does not wait", {.skips_the_wait_to_write = true}, true, 2, kBroadcast},
      {"begin() waits for one peer", {.waits_for_one_peer_only = true}, true, 3, kBroadcast},
      {"publishes before it writes", {.publishes_before_it_writes = true}, true},
      {"one slot", {.one_slot = true}, true},
      {"reads the step before too late",
       {.reads_the_step_before_too_late = true},
       true,
       2,
       kPipelined},
      {"waits for the step before", {.waits_for_the_step_before = true}, true},
      {"raise stores relaxed", {.store = kRelaxed}, true},
      {"wait_for looks relaxed", {.look = kRelaxed}, true},
      {"raise stores with release only", {.store = std::memory_order_release}, false},
      {"raise looks at sleepers relaxed", {.sleepers = kRelaxed}, false},
      {"raise looks at sleepers first", {.looks_at_sleepers_first = true}, false},
      {"counts itself after its last look", {.counts_itself_late = true}, false},
      {"wakes nobody", {.wakes_nobody = true}, false},
      {"wakes one", {}, false, 3, kBroadcast, 1, true},
  };
  for (const Planted& planted : faults) {
    // The reduced search is shown to find what the full one finds.
    for (const bool reduced : {false, true}) {
      const SearchResult result = explore({
          .world = planted.world,
          .operations = std::vector<Operation>(planted.times, planted.operation),
          .fault = planted.fault,
          .options = {.wakes_one = planted.wakes_one, .reduced = reduced, .most_ahead = 3},
      });
      CHECK(shows(result.error, planted.unsafe), "%s: %s\n%s", planted.name,
            result.error.empty() ? "not found" : result.error.c_str(), result.schedule.c_str());
      if (!reduced) {
        std::printf("       %s: %s (%llu states)\n", planted.name, result.error.c_str(),
                    static_cast<unsigned long long>(result.states));
      }
    }
  }
}

}  // namespace
}  // namespace tpkernels::model
