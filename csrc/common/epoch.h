// The protocol of peer memory: W ranks, each with a flag and two slots that all ranks can read.
//
// Ranks go through the same steps, numbered by an epoch. In step e a rank
//
//   begin()    e += 1; waits until every rank has published e - 1
//              writes its slot e % 2
//   publish()  says so: flag = e (release)
//   wait(p)    waits until rank p has published e (acquire)
//              reads p's slot e % 2
//
//   rank 0:  [write 0][publish e  ][wait 1][read 1's slot 0][write 1][publish e + 1] ...
//   rank 1:     [write 0][publish e][wait 0][read 0's ...   ][write 1] ...
//
// RAW: wait(p) acquires what p's publish released, so p's slot is whole when it is read.
// WAR: slot e % 2 was last read in step e - 2. A rank publishes e - 1 after it has read in e - 2,
//      and begin() waits for that: nothing is overwritten that somebody still reads. So one flag a
//      rank is enough, and a rank may run one step ahead of the slowest.
//
// Epochs only grow and are compared by their difference, which is at most 1 in either direction
// between ranks: they may wrap, and nothing is ever reset to a value that an old wait would accept
// (TP-10). A flag is one 32-bit word of one rank, stored with release and loaded with acquire
// (TP-48).
#pragma once

#include <cstdint>

namespace tpkernels {

using Epoch = uint32_t;

// Whether a flag that was seen at `seen` has come to `wanted`.
constexpr bool reached(Epoch seen, Epoch wanted) {
  return static_cast<int32_t>(seen - wanted) >= 0;
}

inline constexpr int kSlots = 2;

// One rank's way through the steps. Signals: publish(epoch) sets this rank's flag, wait(rank,
// epoch) returns once that rank's flag has reached it.
template <class Signals>
class EpochSteps {
 public:
  EpochSteps(Signals& signals, int rank, int world, Epoch start = 0)
      : signals_(signals), rank_(rank), world_(world), epoch_(start) {}

  void begin() {
    ++epoch_;
    // WAR: every rank must have read what slot() held two steps ago.
    for_each_peer([&](int peer) { signals_.wait(peer, epoch_ - 1); });
  }
  void publish() { signals_.publish(epoch_); }
  void wait(int peer) {
    if (peer != rank_) signals_.wait(peer, epoch_);
  }
  void wait_all() {
    for_each_peer([&](int peer) { signals_.wait(peer, epoch_); });
  }

  int slot() const { return static_cast<int>(epoch_ % kSlots); }
  Epoch epoch() const { return epoch_; }

 private:
  // Each rank begins with the one after it, so that they do not all wait at one flag.
  template <class Visit>
  void for_each_peer(Visit&& visit) {
    for (int distance = 1; distance < world_; ++distance) visit((rank_ + distance) % world_);
  }

  Signals& signals_;
  int rank_;
  int world_;
  Epoch epoch_;
};

}  // namespace tpkernels
