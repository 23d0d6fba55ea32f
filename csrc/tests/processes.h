// Ranks that are processes of a test, how each ended, and what they left behind.
#pragma once

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/descriptor_passing.h"
#include "runtime/peer_group.h"

namespace tpkernels::testing {

// A child process that returns what `body` does, or 99 after an exception, which it prints.
inline pid_t in_child(const std::function<int()>& body) {
  std::fflush(stdout);  // the child must not print it again
  const pid_t child = fork();
  if (child != 0) return child;
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::printf("child: %s\n", error.what());
    std::fflush(stdout);
  }
  _exit(status);
}

inline int status_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// This rank's view of memory that rank 0 makes and offers to the others.
inline std::shared_ptr<PeerMemory> meet(DescriptorOffer& offer, int rank, int world) {
  const Seconds limit(20);
  if (rank != 0) {
    return PeerMemory::attach(take_descriptor(offer.address(), limit), rank, world);
  }
  auto memory = PeerMemory::create(0, world);
  offer.serve(memory->descriptor(), world - 1, limit);
  return memory;
}

// Starts a process for each rank, which runs `body(rank, memory)`.
inline std::vector<pid_t> start_processes(
    int world, const std::function<int(int, std::shared_ptr<PeerMemory>)>& body) {
  DescriptorOffer offer;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    children.push_back(in_child([&] { return body(rank, meet(offer, rank, world)); }));
  }
  return children;
}

// The same, and how each ended.
inline std::vector<int> in_processes(
    int world, const std::function<int(int, std::shared_ptr<PeerMemory>)>& body) {
  std::vector<int> statuses;
  for (const pid_t child : start_processes(world, body)) statuses.push_back(status_of(child));
  return statuses;
}

// Entries of a folder whose names begin with `prefix`.
inline int count_entries(const char* folder, const char* prefix = "") {
  DIR* const open = opendir(folder);
  if (open == nullptr) return 0;
  int count = 0;
  while (const dirent* entry = readdir(open)) {
    count += std::strncmp(entry->d_name, prefix, std::strlen(prefix)) == 0;
  }
  closedir(open);
  return count;
}

inline int open_descriptors() { return count_entries("/proc/self/fd"); }

}  // namespace tpkernels::testing
