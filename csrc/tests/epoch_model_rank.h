// A rank of the model: the real EpochSteps, raise and wait_for over simulated words, or with one
// thing about them broken.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/epoch.h"
#include "common/sleeping_flag.h"
#include "tests/epoch_model.h"

namespace tpkernels::model {

// What is broken. The default is the protocol as it is.
struct Fault {
  bool skips_the_wait_to_write = false;  // begin() does not wait
  bool publishes_before_it_writes = false;
  bool one_slot = false;
  bool reads_the_step_before_too_late = false;  // after it has published the next
  bool waits_for_the_step_before = false;
  bool wakes_nobody = false;
  bool counts_itself_late = false;                      // among the sleepers, after its last look
  bool looks_at_sleepers_first = false;                 // and stores its flag then
  bool waits_for_one_peer_only = false;                 // in begin()
  std::memory_order store = std::memory_order_seq_cst;  // of the flag, in raise
  std::memory_order look = std::memory_order_acquire;   // at the flag, before sleeping
  std::memory_order sleepers = std::memory_order_seq_cst;  // the look at them, in raise
};

// One word and a counter as SleepingFlag has, of one rank, seen by another.
struct SimulatedFlag {
  struct Word {
    Epoch load(std::memory_order order) const {
      if (order == std::memory_order_acquire) order = fault.look;
      return start + replay.ask({.kind = Access::kLoadFlag,
                                 .owner = owner,
                                 .value = static_cast<uint8_t>(wanted - start),
                                 .order = order});
    }
    void store(Epoch epoch, std::memory_order order) {
      order = fault.store == std::memory_order_seq_cst ? order : fault.store;
      replay.post({.kind = Access::kStoreFlag,
                   .owner = owner,
                   .value = static_cast<uint8_t>(epoch - start),
                   .order = order});
    }
    Replay& replay;
    const Fault& fault;
    uint8_t owner;
    Epoch start;
    Epoch wanted;
  };
  struct Count {
    // No results: raise and wait_for may not depend on them.
    void fetch_add(uint32_t, std::memory_order order) { change(Access::kAddSleeper, order); }
    void fetch_sub(uint32_t, std::memory_order order) { change(Access::kDropSleeper, order); }
    uint32_t load(std::memory_order order) const {
      if (fault.sleepers != std::memory_order_seq_cst) order = fault.sleepers;
      return replay.ask({.kind = Access::kLoadSleepers, .owner = owner, .order = order});
    }
    void change(Access::Kind kind, std::memory_order order) {
      replay.post({.kind = kind, .owner = owner, .order = order});
    }
    Replay& replay;
    const Fault& fault;
    uint8_t owner;
  };
  SimulatedFlag(Replay& replay, const Fault& fault, int owner, Epoch start, Epoch wanted)
      : epoch{replay, fault, static_cast<uint8_t>(owner), start, wanted},
        sleepers{replay, fault, static_cast<uint8_t>(owner)} {}
  Word epoch;
  Count sleepers;
};

// raise and wait_for with their accesses in a wrong order.
template <class Flag, class System>
void raise_after_a_look(Flag& flag, Epoch epoch, System& system) {
  const bool wakes = flag.sleepers.load(std::memory_order_seq_cst) != 0;
  flag.epoch.store(epoch, std::memory_order_seq_cst);
  if (wakes) system.wake(flag.epoch);
}

template <class Flag, class System>
void wait_without_a_last_look(Flag& flag, Epoch wanted, System& system) {
  for (;;) {
    const Epoch seen = flag.epoch.load(std::memory_order_seq_cst);
    if (reached(seen, wanted)) return;
    // The kernel's own look would save it: so this one sleeps whatever the flag has become.
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    system.sleep_whatever(flag.epoch);
    flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

class ModelRank {
 public:
  // `looks`: at a flag before it sleeps.
  ModelRank(Replay& replay, int rank, int world, const Fault& fault, Epoch start, uint32_t looks)
      : replay_(replay),
        rank_(rank),
        world_(world),
        fault_(fault),
        start_(start),
        looks_(looks),
        steps_(signals_, rank, world, start) {}

  int rank() const { return rank_; }
  int world() const { return world_; }
  const Fault& fault() const { return fault_; }

  void begin() {
    beginning_ = true;
    steps_.begin();
    beginning_ = false;
    if (fault_.publishes_before_it_writes) steps_.publish();
  }
  void write() {
    for (uint8_t word = 0; word < kWords; ++word) access(Access::kWrite, rank_, word);
  }
  void publish() {
    if (!fault_.publishes_before_it_writes) steps_.publish();
  }
  void wait(int peer) { steps_.wait(peer); }
  void wait_all() { steps_.wait_all(); }
  void read(int peer) {
    for (uint8_t word = 0; word < kWords; ++word) access(Access::kRead, peer, word);
  }
  // What it wrote in the step before this one, which has begun and is not published yet.
  void read_step_before(int peer) {
    for (uint8_t word = 0; word < kWords; ++word) access(Access::kRead, peer, word, 1);
  }

  // --- what wait_for and raise ask of the system ---
  bool look_again(uint32_t attempt) { return attempt + 1 < looks_; }
  void sleep(SimulatedFlag::Word& word, Epoch seen) {
    replay_.ask({.kind = Access::kSleep, .owner = word.owner, .value = step(seen)});
    woke();
  }
  void sleep_whatever(SimulatedFlag::Word& word) {
    replay_.ask({.kind = Access::kSleep, .owner = word.owner, .value = kWhatever});
    woke();
  }
  void wake(SimulatedFlag::Word& word) {
    if (!fault_.wakes_nobody) replay_.post({.kind = Access::kWake, .owner = word.owner});
  }

 private:
  struct Signals {
    ModelRank& self;
    void publish(Epoch epoch) { self.raise_own(epoch); }
    void wait(int peer, Epoch epoch) { self.wait_for_peer(peer, epoch); }
  };

  void raise_own(Epoch epoch) {
    next_call();
    SimulatedFlag flag(replay_, fault_, rank_, start_, epoch);
    if (fault_.looks_at_sleepers_first) return raise_after_a_look(flag, epoch, *this);
    raise(flag, epoch, *this);
  }

  void wait_for_peer(int peer, Epoch epoch) {
    next_call();
    if (beginning_ && fault_.skips_the_wait_to_write) return;
    if (beginning_ && fault_.waits_for_one_peer_only && peer != (rank_ + 1) % world_) return;
    if (!beginning_ && fault_.waits_for_the_step_before) --epoch;
    SimulatedFlag flag(replay_, fault_, peer, start_, epoch);
    if (fault_.counts_itself_late) return wait_without_a_last_look(flag, epoch, *this);
    wait_for(flag, epoch, *this);
  }

  void access(Access::Kind kind, int owner, uint8_t word, int steps_ago = 0) {
    next_call();
    const int slot = fault_.one_slot ? 0 : (steps_.slot() + steps_ago) % kSlots;
    replay_.ask({.kind = kind,
                 .owner = static_cast<uint8_t>(owner),
                 .slot = static_cast<uint8_t>(slot),
                 .word = word,
                 .value = step(steps_.epoch() - static_cast<Epoch>(steps_ago))});
  }

  // A rank's state is how many calls it has made, and, within a wait, whether it has slept: what it
  // saw before does not matter to it any more.
  void next_call() { replay_.checkpoint(2 * ++calls_); }
  void woke() { replay_.checkpoint(2 * calls_ + 1); }

  uint8_t step(Epoch epoch) const { return static_cast<uint8_t>(epoch - start_); }

  Replay& replay_;
  int rank_, world_;
  const Fault& fault_;
  Epoch start_;
  uint32_t looks_;
  bool beginning_ = false;
  int calls_ = 0;
  Signals signals_{*this};
  EpochSteps<Signals> steps_;
};

}  // namespace tpkernels::model
