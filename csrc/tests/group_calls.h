// Small operations on peer groups, as tests make them.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/peer_group.h"

namespace tpkernels::testing {

using Group = std::shared_ptr<PeerGroup>;

inline std::vector<int64_t> first_ranks(int world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

inline Group group_of(std::shared_ptr<PeerMemory> memory, Seconds timeout,
                      const std::string& name = "test", Epoch start = 0) {
  const int world = memory->world();
  return std::make_shared<PeerGroup>(std::move(memory), name, first_ranks(world), timeout, start);
}

inline std::vector<Group> loopback_groups(int world, Seconds timeout, Epoch start = 0) {
  std::vector<Group> groups;
  for (auto& memory : PeerMemory::loopback(world)) {
    groups.push_back(group_of(memory, timeout, "test", start));
  }
  return groups;
}

// What each of `bodies` threw on a thread of its own, or "".
inline std::vector<std::string> at_once(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::string> errors(bodies.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < bodies.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        bodies[i]();
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// body(group of the rank) on a thread for each rank.
inline std::vector<std::string> on_threads(std::vector<Group>& groups,
                                           const std::function<void(PeerGroup&)>& body) {
  std::vector<std::function<void()>> bodies;
  for (const Group& group : groups) bodies.push_back([&body, &group] { body(*group); });
  return at_once(bodies);
}

inline Signature signature_of(int64_t size) {
  Signature signature;
  signature.collective = Collective::kAllReduce;
  signature.type = ElementType::kInt64;
  signature.reduction = Reduction::kSum;
  signature.add_dim(size);
  return signature;
}

// The sum over ranks of `value`, in one step.
inline int64_t sum(PeerGroup& group, int64_t value, int64_t size = 2) {
  PeerGroup::Operation operation(group, signature_of(size));
  std::memcpy(operation.begin(sizeof value), &value, sizeof value);
  operation.publish();
  operation.wait_all();
  int64_t total = 0;
  for (int rank = 0; rank < group.world(); ++rank) {
    int64_t theirs;
    std::memcpy(&theirs, operation.slot(rank), sizeof theirs);
    total += theirs;
  }
  operation.finish();
  return total;
}

inline void sum_often(PeerGroup& group, int times) {
  for (int64_t i = 0; i < times; ++i) {
    const int64_t world = group.world();
    const int64_t found = sum(group, i * world + group.rank());
    const int64_t expected = world * world * i + world * (world - 1) / 2;
    if (found != expected) throw PeerError("wrong sum " + std::to_string(found));
  }
}

// What a sum says that fails, or "".
inline std::string error_of_sum(PeerGroup& group) {
  try {
    sum(group, 1);
  } catch (const PeerError& error) {
    return error.what();
  }
  return "";
}

inline bool says(const std::string& error, const std::string& text) {
  return error.find(text) != std::string::npos;
}

}  // namespace tpkernels::testing
