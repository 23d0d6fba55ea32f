#include "runtime/peer_group.h"

#include <sched.h>

#include <bit>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "runtime/futex.h"
#include "runtime/interrupts.h"
#include "runtime/process_exit.h"

namespace tpkernels {
namespace {

// How long to look before sleeping: pauses, then yields. A pause takes 25 ns and a yield with
// nobody to yield to 0.5 us (EPYC, Linux 6.18), so on free processors the sum is 130 us: more
// than ranks of one model drift apart between two operations, less than anybody misses a core for.
// Where others want the processor, pauses only make the rank late that is waited for: with
// compilers beside 2 ranks on 2 cores, a step took 190 us with 4000 pauses, 12 us with these.
constexpr uint32_t kPauses = 100;
constexpr uint32_t kYields = 250;
// With fewer processors than ranks that rank is likely to need this very processor. On 2 cores a
// step of 4 ranks took 10 us with 40 pauses first, 6 us with none; of 8 ranks 25 and 18 us.
constexpr uint32_t kYieldsCrowded = 60;
// A thread of its own looks less: its process computes meanwhile.
constexpr uint32_t kPausesBeside = 200;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string seconds_text(Seconds seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds.count());
  return text;
}

}  // namespace

PeerGroup::PeerGroup(std::shared_ptr<PeerMemory> memory, std::string name,
                     std::vector<int64_t> global_ranks, Seconds timeout, Epoch start)
    : memory_(std::move(memory)),
      name_(std::move(name)),
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout.count()),
      epoch_(start) {
  if (static_cast<int>(global_ranks_.size()) != world()) {
    throw PeerError("group " + name_ + ": " + std::to_string(global_ranks_.size()) +
                    " global ranks for a group of " + std::to_string(world()));
  }
  memory_->control(rank()).arrived.epoch.store(start, std::memory_order_seq_cst);
  look_at_processors();
}

PeerGroup::~PeerGroup() { queue_.stop(); }

Seconds PeerGroup::timeout() const { return Seconds(timeout_.load(std::memory_order_relaxed)); }

void PeerGroup::set_timeout(Seconds timeout) {
  timeout_.store(timeout.count(), std::memory_order_relaxed);
}

void PeerGroup::refuse_forks() const {
  if (!made_here_.forked()) return;
  throw PeerError("group " + name_ + ": this process is a fork of rank " + rank_text(rank()) +
                  ", and no rank itself. Fix: call collectives only in the process that made the "
                  "group, not in DataLoader workers or other forks of it");
}

void PeerGroup::abort(const std::string& reason) {
  if (made_here_.forked()) return;  // the group goes on without this process
  AbortRecord& record = memory_->abort_record();
  uint32_t expected = AbortRecord::kNone;
  if (record.state.compare_exchange_strong(expected, AbortRecord::kWriting)) {
    record.by = rank();
    std::snprintf(record.reason, sizeof record.reason, "%s", reason.c_str());
    record.state.store(AbortRecord::kWritten, std::memory_order_release);
  }
  for (int peer = 0; peer < world(); ++peer) {
    futex_wake(memory_->control(peer).arrived.epoch, INT_MAX);
  }
}

std::optional<std::string> PeerGroup::ended() const {
  const AbortRecord& record = memory_->abort_record();
  if (record.state.load(std::memory_order_acquire) == AbortRecord::kNone) return std::nullopt;
  for (int look = 0; look < 1000; ++look) {  // its writer may be killed before it is done
    if (record.state.load(std::memory_order_acquire) == AbortRecord::kWritten) {
      return std::string(record.reason) +
             (record.by == rank() ? "" : " (found by rank " + rank_text(record.by) + ")");
    }
    sched_yield();
  }
  return "a rank ended the group";
}

std::string PeerGroup::rank_text(int rank) const {
  const std::string text = std::to_string(rank);
  if (global_ranks_[rank] == rank) return text;
  return text + " (global rank " + std::to_string(global_ranks_[rank]) + ")";
}

void PeerGroup::look_at_processors() {
  uint64_t processors[16] = {};
  int ranks = 0, count = 0;
  for (int peer = 0; peer < world(); ++peer) {
    const ControlBlock& control = memory_->control(peer);
    if (control.process.load(std::memory_order_acquire) == 0) continue;  // not yet there
    ++ranks;
    for (int word = 0; word < 16; ++word) processors[word] |= control.processors[word];
  }
  for (const uint64_t word : processors) count += std::popcount(word);
  crowded_ = count < ranks;
  all_are_here_ = ranks == world();
}

void PeerGroup::refuse_nesting() const {
  if (turn_of_.load(std::memory_order_relaxed) == std::this_thread::get_id()) throw_nested();
}

void PeerGroup::throw_nested() const {
  throw PeerError("group " + name_ +
                  ": a signal handler calls a collective while its thread waits "
                  "in another one. Fix: let the handler set a flag, and act on it between steps");
}

void PeerGroup::refuse_ended() const {
  if (const std::optional<std::string> reason = ended()) throw PeerError(*reason);
}

bool PeerGroup::idle() const {
  return queue_.idle() && turn_of_.load(std::memory_order_relaxed) == std::thread::id();
}

void PeerGroup::end_interrupted() {
  abort("rank " + rank_text(rank()) + " of group " + name_ +
        " was interrupted by a signal while it waited for an operation of another thread. Fix: "
        "make a new group");
}

template <class Wait>
void PeerGroup::ending_if_interrupted(const Wait& wait) {
  try {
    wait();
  } catch (const Interrupted&) {
    end_interrupted();
    throw;
  }
}

void PeerGroup::help_until(const std::function<bool()>& is_done) {
  refuse_forks();
  refuse_nesting();
  if (queue_.is_within_work()) throw_nested();  // which waits for its turn
  if (process_exits()) refuse_ended();
  ending_if_interrupted([&] { queue_.help_until(is_done); });
}

using Operation = PeerGroup::Operation;

Operation::Turn::Turn(PeerGroup& group) : group(group) {
  group.refuse_forks();
  group.refuse_nesting();
  if (process_exits()) group.refuse_ended();  // who has the turn may keep it
  group.ending_if_interrupted([&group] {
    group.queue_.drain();
    group.turn_.lock();
  });
  group.turn_of_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

Operation::Turn::~Turn() {
  stay_if_process_exits();
  group.turn_of_.store({}, std::memory_order_relaxed);
  group.turn_.unlock();
}

Operation::Operation(PeerGroup& group, const Signature& signature, std::optional<Seconds> timeout)
    : group_(group),
      memory_(*group.memory_),
      turn_(group),
      signature_(signature),
      number_(++group.operations_),
      timeout_(timeout.value_or(group.timeout())),
      steps_(signals_, memory_.rank(), memory_.world(), group.epoch_) {
  if (!group.all_are_here_) group.look_at_processors();
  if (memory_.abort_record().state.load(std::memory_order_relaxed) != AbortRecord::kNone) {
    look_around();
  }
}

Operation::~Operation() {
  group_.epoch_ = steps_.epoch();
  if (!finished_) {
    group_.abort(title() + ": rank " + group_.rank_text(rank()) + " left it by an error");
  }
}

std::byte* Operation::begin(size_t bytes) {
  memory_.reserve(bytes);
  waited_epoch_ = steps_.epoch();
  steps_.begin();
  if (first_step_) memory_.control(rank()).signatures[steps_.slot()] = signature_;
  return memory_.slot(rank(), steps_.slot());
}

void Operation::publish() {
  steps_.publish();
  waited_epoch_ = steps_.epoch();
}

void Operation::wait(int peer) {
  steps_.wait(peer);
  if (first_step_ && peer != rank()) check(peer);
}

void Operation::wait_all() {
  steps_.wait_all();
  if (!first_step_) return;
  for (int peer = 0; peer < world(); ++peer) check(peer);
  first_step_ = false;
}

void Operation::check(int peer) {
  const Signature& theirs = memory_.control(peer).signatures[steps_.slot()];
  if (theirs == signature_) return;
  end_group("the ranks of group " + group_.name_ + " do different things in operation " +
            std::to_string(number_) + ": rank " + group_.rank_text(rank()) + " calls " +
            signature_.text() + ", rank " + group_.rank_text(peer) + " calls " + theirs.text() +
            ". Fix: let every rank of a group call the same operations in the same order, with "
            "the same shapes and dtypes");
}

void Operation::Signals::publish(Epoch epoch) {
  raise(operation.memory_.control(operation.rank()).arrived, epoch, operation);
}

void Operation::Signals::wait(int peer, Epoch epoch) {
  wait_for(operation.memory_.control(peer).arrived, epoch, operation);
  operation.timing_ = false;  // the limit is one for each wait
}

bool Operation::look_again(uint32_t attempt) {
  const bool beside = group_.queue_.on_own_thread();
  const uint32_t pauses = group_.crowded_ ? 0 : beside ? kPausesBeside : kPauses;
  const uint32_t yields = group_.crowded_ ? kYieldsCrowded : beside ? 0 : kYields;
  if (attempt >= pauses + yields) return false;
  if (attempt < pauses) {
    pause();
  } else {
    sched_yield();
  }
  return true;
}

void Operation::sleep(std::atomic<Epoch>& word, Epoch seen) {
  look_around();
  if (futex_wait(word, seen) == FutexWait::kNothing) look_for_interrupt();
}

void Operation::look_for_interrupt() {
  try {
    check_interrupt();
  } catch (const Interrupted&) {
    group_.abort(title() + ": rank " + group_.rank_text(rank()) +
                 " was interrupted by a signal. Fix: make a new group");
    finished_ = true;
    throw;
  }
}

void Operation::wake(std::atomic<Epoch>& word) { futex_wake(word, INT_MAX); }

std::vector<int> Operation::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < world(); ++peer) {
    const Epoch seen = memory_.control(peer).arrived.epoch.load(std::memory_order_seq_cst);
    if (peer != rank() && !reached(seen, waited_epoch_)) ranks.push_back(peer);
  }
  return ranks;
}

void Operation::look_around() {
  stay_if_process_exits();
  if (const std::optional<std::string> reason = group_.ended()) {
    finished_ = true;  // nothing more to tell the others
    throw PeerError(*reason + ". This was rank " + group_.rank_text(rank()) + " in " + title());
  }
  for (const int peer : missing()) {
    if (!memory_.gone(peer)) continue;
    // It may have arrived and then ended.
    if (reached(memory_.control(peer).arrived.epoch.load(std::memory_order_seq_cst),
                waited_epoch_)) {
      continue;
    }
    const ControlBlock& control = memory_.control(peer);
    const bool left = control.left.load(std::memory_order_acquire) != 0;
    end_group(title() + ": rank " + group_.rank_text(peer) + " (process " +
              std::to_string(control.process.load()) + ") " +
              (left ? "has left the group" : "is gone: its process has ended"));
  }
  if (!timing_) {
    timing_ = true;
    wait_began_ = Clock::now();
    return;
  }
  if (Seconds(Clock::now() - wait_began_) < timeout_) return;
  std::string who;
  for (const int peer : missing()) who += (who.empty() ? "" : ", ") + group_.rank_text(peer);
  if (who.empty()) return;  // it came just now
  end_group(title() + ": no arrival of rank " + who + " within " + seconds_text(timeout_) +
            ". Fix: see what that rank does instead, or allow more seconds in TPKERNELS_TIMEOUT");
}

void Operation::end_group(const std::string& what) {
  group_.abort(what);
  finished_ = true;
  throw PeerError(what);
}

std::string Operation::title() const {
  std::string ranks;
  for (const int64_t rank : group_.global_ranks_) {
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return signature_.text() + ", operation " + std::to_string(number_) + " of group " +
         group_.name_ + " (global ranks [" + ranks + "])";
}

}  // namespace tpkernels
