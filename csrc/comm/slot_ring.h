// Where the steps of an operation lie in the slots, and how a slot is written.
//
// A line that a peer has read is slow to write again while the peer's cache holds a copy of it:
// where the ranks share a last-level cache 7 ns a line (9 GB/s), with or without prefetching for
// writing, against 2.2 once the peer has lost it. So large steps go round in the slot, and come
// back to a line when the peers' second-level caches have forgotten it.
//
// Between cores without a common cache every such line costs 13 to 28 ns, forgotten or not. There a
// rank streams: it writes past the caches, which costs 2.3 ns a line wherever the peer is; the peer
// then reads from memory, at half the speed of a near cache. Each rank finds out for itself, from
// the time that its writes take: a virtual machine may not know which caches are shared, and moves
// its processors.
//
// Small steps stay where they are: they cost latency, and leave the caches to the caller.
// (Measured as StepSizes; near and far: 50 and 250 ns from a store to the other core's load.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/collectives.h"

namespace tpkernels {

using Operation = PeerGroup::Operation;

// Parts of a slot begin at multiples of this many bytes: a cache line, and the widest vector.
inline constexpr int64_t kLine = 64;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t lines_up(int64_t bytes) { return divide_up(bytes, kLine) * kLine; }
constexpr int64_t lines_down(int64_t bytes) { return std::max(bytes / kLine, int64_t{1}) * kLine; }

inline void copy_bytes(void* out, const void* in, int64_t bytes) {
  if (out != in && bytes > 0) std::memcpy(out, in, static_cast<size_t>(bytes));
}

class SlotRing {
 public:
  // `step_bytes`: the most that a step needs of a slot, the same on all ranks.
  SlotRing(Operation& operation, int64_t step_bytes, const StepSizes& sizes)
      : operation_(operation),
        step_bytes_(std::max(lines_up(step_bytes), kLine)),
        large_(step_bytes >= sizes.ring_from),
        places_(large_ ? static_cast<Epoch>(std::max(sizes.ring / step_bytes_, int64_t{1})) : 1) {}

  std::byte* begin() {
    std::byte* const slot = operation_.begin(static_cast<size_t>(places_ * step_bytes_));
    return slot + offset();
  }
  const std::byte* slot(int peer) const { return operation_.slot(peer) + offset(); }
  // Between begin() and publish(). `out`: in this rank's slot, at the beginning of a line.
  void write(std::byte* out, const void* in, int64_t bytes) {
    if (large_) {
      write_large(out, in, bytes);
    } else {
      copy_bytes(out, in, bytes);
    }
  }

 private:
  void write_large(std::byte* out, const void* in, int64_t bytes);
  int64_t offset() const {
    return places_ == 1 ? 0 : operation_.epoch() / kSlots % places_ * step_bytes_;
  }

  Operation& operation_;
  int64_t step_bytes_;
  bool large_;
  Epoch places_;
};

}  // namespace tpkernels
