// Ranks of one host that go through the same operations over peer memory, one at a time.
//
//   PeerGroup::Operation operation(group, signature);
//   std::byte* own = operation.begin(bytes);   // a step: this rank's slot, `bytes` of it
//   ... write own ...
//   operation.publish();
//   operation.wait_all();                      // in the first step: that all do the same
//   ... read operation.slot(peer) ...
//   operation.finish();
//
// A rank that is missing, late, gone or does something else ends the operation with PeerError on
// every rank, and the group with it: the error names group, operation, and ranks. So does a signal
// whose handler raises while a rank waits (Interrupted). All state is the group's own, so any
// number of groups may be in use at once, by any threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/epoch.h"
#include "runtime/fork_guard.h"
#include "runtime/interruptible_mutex.h"
#include "runtime/peer_memory.h"
#include "runtime/progress_queue.h"
#include "runtime/signature.h"

namespace tpkernels {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

class PeerGroup {
 public:
  class Operation;

  // `name` and `global_ranks` (one a rank of the group) are for messages. `start`: where the epochs
  // begin, the same on all ranks; other than 0 only where all have made theirs before one begins an
  // operation, as flags are 0 until then.
  PeerGroup(std::shared_ptr<PeerMemory> memory, std::string name, std::vector<int64_t> global_ranks,
            Seconds timeout, Epoch start = 0);
  ~PeerGroup();
  PeerGroup(const PeerGroup&) = delete;

  int rank() const { return memory_->rank(); }
  int world() const { return memory_->world(); }
  const std::string& name() const { return name_; }
  Seconds timeout() const;
  void set_timeout(Seconds timeout);
  // Operations begun so far.
  uint64_t operations() const { return operations_; }

  // Ends this and all later operations of all ranks with PeerError, for the first reason given.
  void abort(const std::string& reason);
  // The same, as a signal has ended this rank's wait for an operation of another thread.
  void end_interrupted();
  // The reason for which the group has ended, if it has.
  std::optional<std::string> ended() const;

  // Asynchronous operations, in order. Operations of other threads come after what was submitted.
  ProgressQueue& queue() { return queue_; }
  // Whether nothing is submitted, waiting or under way.
  bool idle() const;
  // Waits for what was submitted, as ProgressQueue::help_until; also throws PeerError.
  void help_until(const std::function<bool()>& is_done);

 private:
  friend class Operation;

  // Writes of slots past the caches, for SlotRing: from operation to operation.
  struct Streaming {
    int writes = 0;  // still to come
    int burst = 0;   // of which there were so many
  };

  std::string rank_text(int rank) const;  // "1", or "1 (global 5)" where they differ
  void look_at_processors();
  // Throws PeerError in a forked child: two processes would be the same rank.
  void refuse_forks() const;
  // Throws PeerError on a thread that is within an operation: a signal handler of its would wait
  // for what comes after itself.
  void refuse_nesting() const;
  [[noreturn]] void throw_nested() const;
  void refuse_ended() const;
  // Runs `wait`; where a signal ends it, it ends the group.
  template <class Wait>
  void ending_if_interrupted(const Wait& wait);

  std::shared_ptr<PeerMemory> memory_;
  std::string name_;
  std::vector<int64_t> global_ranks_;
  InterruptibleMutex turn_;  // held by the operation in progress
  std::atomic<std::thread::id> turn_of_{};
  std::atomic<double> timeout_;
  std::atomic<uint64_t> operations_{0};
  Epoch epoch_;  // of the last step
  Streaming streaming_;
  bool crowded_ = false;       // more ranks than processors for them
  bool all_are_here_ = false;  // and so crowded_ is final
  ForkGuard made_here_;
  ProgressQueue queue_;  // last: its thread ends before what it uses
};

// One collective of one rank, from its first step to finish(). Left without finish(), as by an
// exception, it ends the group: the others must not wait for what will not come.
class PeerGroup::Operation {
 public:
  // Waits for its turn. `timeout`: in place of the group's, for every wait of this operation.
  Operation(PeerGroup& group, const Signature& signature,
            std::optional<Seconds> timeout = std::nullopt);
  ~Operation();
  Operation(const Operation&) = delete;

  int rank() const { return memory_.rank(); }
  int world() const { return memory_.world(); }

  // Starts a step once nobody reads this rank's slot any more; `bytes` of it may be written. Throws
  // PeerError, as wait does.
  std::byte* begin(size_t bytes);
  void publish();
  // Until `peer` has published this step; then its slot may be read, until this rank publishes the
  // next step.
  void wait(int peer);
  void wait_all();
  // Of the step in progress, the same on all ranks.
  Epoch epoch() const { return steps_.epoch(); }
  Streaming& streaming() { return group_.streaming_; }
  const std::byte* slot(int peer) const { return memory_.slot(peer, steps_.slot()); }
  // All that this rank had to read has been read.
  void finish() { finished_ = true; }
  // Ends the operation and its group on every rank: what this rank has read cannot be right.
  [[noreturn]] void fail(const std::string& reason) { end_group(title() + ": " + reason); }

  // --- what EpochSteps and wait_for ask of the system ---
  struct Signals {
    Operation& operation;
    void publish(Epoch epoch);
    void wait(int peer, Epoch epoch);
  };
  bool look_again(uint32_t attempt);
  void sleep(std::atomic<Epoch>& word, Epoch seen);
  void wake(std::atomic<Epoch>& word);

 private:
  void check(int peer);  // that its signature is this rank's
  void look_around();    // whether to give up
  void look_for_interrupt();
  [[noreturn]] void end_group(const std::string& what);
  std::string title() const;  // "all_reduce(sum) of float32 [3], operation 17 of group tp"
  std::vector<int> missing() const;

  PeerGroup& group_;
  PeerMemory& memory_;
  struct Turn {  // one thread after the other
    explicit Turn(PeerGroup& group);
    ~Turn();
    PeerGroup& group;
  };

  Turn turn_;
  const Signature signature_;
  const uint64_t number_;
  const Seconds timeout_;
  Signals signals_{*this};
  EpochSteps<Signals> steps_;
  bool first_step_ = true;
  bool finished_ = false;
  Epoch waited_epoch_ = 0;  // what the wait in progress waits for
  Clock::time_point wait_began_;
  bool timing_ = false;  // wait_began_ is set
};

}  // namespace tpkernels
