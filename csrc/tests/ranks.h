// Groups of ranks that are threads or processes of a test, and what befell each.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/descriptor_passing.h"
#include "runtime/peer_group.h"

namespace tpkernels::testing {

inline std::shared_ptr<PeerGroup> group_over(std::shared_ptr<PeerMemory> memory,
                                             const std::string& name, Seconds timeout) {
  std::vector<int64_t> ranks(memory->world());
  for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank] = static_cast<int64_t>(rank);
  return std::make_shared<PeerGroup>(std::move(memory), name, ranks, timeout);
}

// body(group) on a thread for each rank of a new group; what each threw, or "".
inline std::vector<std::string> on_threads(int world, Seconds timeout,
                                           const std::function<void(PeerGroup&)>& body) {
  std::vector<std::shared_ptr<PeerGroup>> groups;
  for (auto& memory : PeerMemory::loopback(world)) {
    groups.push_back(group_over(memory, "threads", timeout));
  }
  std::vector<std::string> errors(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*groups[rank]);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        groups[rank]->abort(error.what());  // or the others would wait for it
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The same in a process for each rank; the ranks whose body threw say why on the screen. Whether
// all came to their end.
inline bool in_processes(int world, Seconds timeout, const std::function<void(PeerGroup&)>& body) {
  std::fflush(stdout);  // or the children have it to write, too
  DescriptorOffer offer;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 1;
      std::shared_ptr<PeerGroup> group;
      try {
        std::shared_ptr<PeerMemory> memory;
        if (rank == 0) {
          memory = PeerMemory::create(0, world);
          offer.serve(memory->descriptor(), world - 1, timeout);
        } else {
          memory = PeerMemory::attach(take_descriptor(offer.address(), timeout), rank, world);
        }
        group = group_over(std::move(memory), "processes", timeout);
        body(*group);
        status = 0;
      } catch (const std::exception& error) {
        std::printf("rank %d: %s\n", rank, error.what());
        std::fflush(stdout);
        if (group) group->abort(error.what());
      }
      _exit(status);
    }
    children.push_back(child);
  }
  bool all_well = true;
  for (const pid_t child : children) {
    int status = 1;
    waitpid(child, &status, 0);
    all_well = all_well && status == 0;
  }
  return all_well;
}

}  // namespace tpkernels::testing
