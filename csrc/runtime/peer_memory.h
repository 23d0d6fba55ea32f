// Memory that all ranks of a group can address: for each rank a control block and two slots.
//
// Shared: one anonymous file (memfd) a group. It has no name, so a killed process leaves nothing
// behind, and is not charged to /dev/shm. Its size is fixed and sealed when it is made; pages come
// when a rank asks for them with reserve(), so a slot grows without moving. Loopback: the same
// inside one process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/epoch.h"
#include "common/sleeping_flag.h"
#include "runtime/signature.h"

namespace tpkernels {

// A failure of communication: a rank is missing, late, or did something else than this one.
class PeerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a rank tells the others, beside its slots. All zero at first.
struct ControlBlock {
  SleepingFlag arrived;
  Signature signatures[kSlots];  // of the operation whose first step uses the slot
  std::atomic<int32_t> process;  // its pid, once it has mapped the memory
  std::atomic<uint32_t> left;    // 1 once it has left in good order
  uint64_t processors[16];       // the CPUs that it may run on, bit by bit
};

// Why the group cannot go on, said once by the rank that found out first.
struct AbortRecord {
  enum State : uint32_t { kNone = 0, kWriting = 1, kWritten = 2 };
  std::atomic<uint32_t> state;
  int32_t by;  // rank of the group
  char reason[1016];
};

class PeerMemory {
 public:
  static constexpr size_t kSlotBytes = size_t{32} << 20;  // at most; only addresses until reserved

  // New anonymous shared memory for `world` ranks, of which this process is `rank`. Throws
  // PeerError.
  static std::shared_ptr<PeerMemory> create(int rank, int world);
  // What another process created, by its descriptor, which is taken over.
  static std::shared_ptr<PeerMemory> attach(int descriptor, int rank, int world);
  // The views of `world` ranks that are threads of this process.
  static std::vector<std::shared_ptr<PeerMemory>> loopback(int world);

  virtual ~PeerMemory() = default;

  int rank() const { return rank_; }
  int world() const { return world_; }
  ControlBlock& control(int rank) const { return *control_[rank]; }
  AbortRecord& abort_record() const { return *abort_; }
  std::byte* slot(int rank, int index) const {
    return slots_ + (static_cast<size_t>(rank) * kSlots + index) * kSlotBytes;
  }

  // Makes the first `bytes` of both of this rank's slots usable. Throws PeerError.
  void reserve(size_t bytes) {
    if (bytes > reserved_) grow(bytes);
  }

  // Whether the process of `rank` is gone, in good order or not. A system call.
  virtual bool gone(int rank) const = 0;
  // The descriptor to pass on, or -1.
  virtual int descriptor() const { return -1; }
  // This rank leaves: others that wait for it are told so.
  void leave();

 protected:
  PeerMemory(int rank, int world) : rank_(rank), world_(world) {}
  static size_t total_bytes(int world);
  void place(std::byte* base);  // of memory of total_bytes, all zero or in use by other ranks
  virtual void allocate(size_t offset, size_t bytes) = 0;

 private:
  void grow(size_t bytes);

  int rank_;
  int world_;
  size_t reserved_ = 0;
  std::byte* base_ = nullptr;
  std::byte* slots_ = nullptr;
  AbortRecord* abort_ = nullptr;
  std::vector<ControlBlock*> control_;
};

}  // namespace tpkernels
