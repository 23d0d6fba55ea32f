// A model of the memory that ranks share, and a search through every schedule of a program over it.
//
// A rank's code is run for real, against simulated words that record what it does next. Between two
// accesses a rank's state is a pure function of what it has read, so each rank becomes an automaton
// (an access, and what follows for each answer), and the search walks the product of the automata
// and the memory, breadth first: the first schedule found to be wrong is a shortest one.
//
// The memory is weaker than any processor's: a load that is not sequentially consistent may see any
// store that the reader does not know to be overwritten (by coherence or happens-before), and a
// store that is not sequentially consistent may be overlooked by a sequentially consistent load.
// Happens-before is tracked with vector clocks, and arises only from a release store of a flag to
// an acquire load of it. Slots are plain memory, of two words: two accesses of which one writes,
// without happens-before, are a race, whatever came first in the schedule.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tpkernels::model {

inline constexpr int kMostRanks = 3;
inline constexpr int kWords = 2;  // of a slot: a read may be torn between them

inline constexpr uint8_t kWhatever = 255;  // one who sleeps unasked, whatever the flag is by now

// What a rank does next to what is shared.
struct Access {
  enum Kind : uint8_t {
    kLoadFlag,
    kStoreFlag,
    kAddSleeper,
    kDropSleeper,
    kLoadSleepers,
    kSleep,
    kWake,
    kWrite,
    kRead,
    kEnd,
  };
  Kind kind = kEnd;
  uint8_t owner = 0;  // the rank whose flag or slot it is
  uint8_t slot = 0;
  uint8_t word = 0;
  uint8_t value = 0;  // wanted, stored, written, expected by a read, or seen by one who sleeps
  std::memory_order order = std::memory_order_seq_cst;

  std::string text() const;
  bool operator==(const Access&) const = default;
};

// Runs a rank's code up to its first access that has no answer yet.
class Replay {
 public:
  struct Stop {};

  explicit Replay(const std::vector<uint8_t>& answers) : answers_(answers) {}

  uint8_t ask(const Access& access);  // throws Stop at the end of the answers
  void post(const Access& access);    // has no answer: never throws
  // The rank has forgotten all answers so far: `position` is all that what it does depends on.
  void checkpoint(int position) {
    if (!found_) since_ = next_, position_ = position;
  }
  void end() {
    checkpoint(0);
    post(Access{});
  }

  const Access& found() const { return *found_; }
  // Equal for two replays whose ranks are in the same state.
  std::pair<int, std::vector<uint8_t>> state() const {
    return {position_, {answers_.begin() + static_cast<ptrdiff_t>(since_), answers_.end()}};
  }

 private:
  const std::vector<uint8_t>& answers_;
  size_t next_ = 0;   // answers used
  size_t since_ = 0;  // of them at the last checkpoint
  int position_ = 0;  // of the last checkpoint
  std::optional<Access> found_;
};

using Program = std::function<void(Replay&)>;

// A rank's code as accesses and what follows them, made as the search comes by.
class Automaton {
 public:
  explicit Automaton(Program program) : program_(std::move(program)) { node_of({}); }

  const Access& access(uint16_t node) const { return nodes_[node].access; }
  uint16_t after(uint16_t node, uint8_t answer);

 private:
  struct Node {
    std::vector<uint8_t> answers;  // one way to come here
    Access access;
    std::map<uint8_t, uint16_t> next;
  };
  uint16_t node_of(std::vector<uint8_t> answers);

  Program program_;
  std::vector<Node> nodes_;
  std::map<std::pair<int, std::vector<uint8_t>>, uint16_t> known_;
};

struct SearchOptions {
  bool spurious_wakes = true;  // a sleeper may wake at any time, as after a signal or a limit
  bool wakes_one = false;      // a wake lets only one sleeper go on (a planted bug)
  // Some accesses are made as soon as a rank comes to them, in one order instead of all. No race
  // and no deadlock is lost where spurious wakes are searched too:
  //   slots: a race is found in whatever order, so they commute with everything;
  //   a look at a flag that can only see what is wanted: later it would see the same or more, and
  //     know more of what happened before, which makes fewer races and fewer stale looks;
  //   a wake, and being no sleeper any more: later they could only cause a wake that nobody needs,
  //     as spurious wakes do.
  bool reduced = false;
  int most_ahead = 1;  // steps that a rank may be ahead of another
};

struct SearchResult {
  uint64_t states = 0;
  std::string error;     // "" if every schedule is right
  std::string schedule;  // of the error, an access a line
};

SearchResult search(const std::vector<Program>& programs, const SearchOptions& options = {});

}  // namespace tpkernels::model
