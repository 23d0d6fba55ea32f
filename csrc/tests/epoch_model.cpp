#include "tests/epoch_model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace tpkernels::model {

std::string Access::text() const {
  const std::string whose = " of rank " + std::to_string(owner);
  const std::string number = std::to_string(value);
  switch (kind) {
    case kLoadFlag:
      return "looks at the flag" + whose;
    case kStoreFlag:
      return "publishes " + number;
    case kAddSleeper:
      return "counts itself among the sleepers" + whose;
    case kDropSleeper:
      return "is no sleeper" + whose + " any more";
    case kLoadSleepers:
      return "looks at its sleepers";
    case kSleep:
      return "sleeps unless the flag" + whose + " is not " + number;
    case kWake:
      return "wakes its sleepers";
    case kWrite:
      return "writes word " + std::to_string(word) + " of its slot " + std::to_string(slot) +
             " for step " + number;
    case kRead:
      return "reads word " + std::to_string(word) + " of slot " + std::to_string(slot) + whose +
             " in step " + number;
    case kEnd:
      break;
  }
  return "ends";
}

uint8_t Replay::ask(const Access& access) {
  if (next_ < answers_.size()) return answers_[next_++];
  if (!found_) found_ = access;
  throw Stop{};
}

void Replay::post(const Access& access) {
  if (next_ < answers_.size()) {
    ++next_;
  } else if (!found_) {
    found_ = access;
  }
}

uint16_t Automaton::after(uint16_t node, uint8_t answer) {
  const auto known = nodes_[node].next.find(answer);
  if (known != nodes_[node].next.end()) return known->second;
  std::vector<uint8_t> answers = nodes_[node].answers;
  answers.push_back(answer);
  const uint16_t next = node_of(std::move(answers));
  nodes_[node].next[answer] = next;
  return next;
}

uint16_t Automaton::node_of(std::vector<uint8_t> answers) {
  Replay replay(answers);
  try {
    program_(replay);
    replay.end();
  } catch (const Replay::Stop&) {
  }
  const auto [place, is_new] = known_.emplace(replay.state(), nodes_.size());
  if (is_new) {
    nodes_.push_back({std::move(answers), replay.found(), {}});
  } else if (nodes_[place->second].access != replay.found()) {
    std::abort();  // a checkpoint where the rank had not forgotten
  }
  return place->second;
}

namespace {

constexpr int kRecent = 4;  // stores of a flag that somebody may still see: most_ahead + 1 at least

struct Store {
  uint8_t value;
  uint8_t sequential;  // seq_cst
  uint8_t clock[kMostRanks];
};

// All bytes count: states are compared and hashed as memory.
struct State {
  uint16_t node[kMostRanks];
  int8_t asleep[kMostRanks];              // the rank whose flag it sleeps at, or -1
  uint8_t clock[kMostRanks][kMostRanks];  // [r][p]: r knows p's first so many publications
  uint8_t seen[kMostRanks][kMostRanks];   // [r][p]: r has seen p's store of this number
  uint8_t stores[kMostRanks];             // of each flag, so far; its number is its epoch
  Store recent[kMostRanks][kRecent];      // the one of number n at n % kRecent
  uint8_t sleepers[kMostRanks];
  uint8_t words[kMostRanks][2][kWords];
  uint8_t written[kMostRanks][2];           // the owner's clock at the last write
  uint8_t read[kMostRanks][2][kMostRanks];  // each reader's clock at its last read
  uint8_t unused[7];                        // to a multiple of 8 bytes
  bool operator==(const State& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::has_unique_object_representations_v<State>);

uint64_t hash_of(const State& state) {
  uint64_t hash = 0, part = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&state);
  for (size_t at = 0; at < sizeof state; at += sizeof part) {
    part = 0;
    std::memcpy(&part, bytes + at, std::min(sizeof part, sizeof state - at));
    hash = (hash ^ part) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, as Fibonacci hashing
    hash ^= hash >> 29;
  }
  return hash;
}

class Search {
 public:
  Search(const std::vector<Program>& programs, const SearchOptions& options)
      : options_(options), world_(static_cast<int>(programs.size())) {
    for (const Program& program : programs) automata_.emplace_back(program);
    State first;
    std::memset(&first, 0, sizeof first);
    for (int rank = 0; rank < kMostRanks; ++rank) {
      first.asleep[rank] = -1;
      first.clock[rank][rank] = 1;
      for (int owner = 0; owner < kMostRanks; ++owner) first.recent[owner][0].sequential = 1;
    }
    table_.resize(1 << 12);
    add(first, 0, 0);
  }

  SearchResult run() {
    for (size_t at = 0; at < states_.size() && error_.empty(); ++at) expand(at);
    SearchResult result{.states = states_.size(), .error = error_, .schedule = {}};
    if (!error_.empty()) result.schedule = schedule();
    return result;
  }

 private:
  void expand(size_t at) {
    at_ = at;
    const State state = states_[at];
    for (int rank = 0; options_.reduced && rank < world_; ++rank) {
      if (state.asleep[rank] < 0 && at_once(state, rank)) return step(state, rank, true);
    }
    bool moves = false, ended = true;
    for (int rank = 0; rank < world_; ++rank) {
      if (state.asleep[rank] >= 0) {
        ended = false;
        if (options_.spurious_wakes) {
          State next = state;
          next.asleep[rank] = -1;
          go(next, rank, rank, 0);
        }
      } else if (access(state, rank).kind != Access::kEnd) {
        moves = true;
        step(state, rank, false);
        if (!error_.empty()) return;
      }
    }
    if (moves) return;
    if (!ended) fail(world_, "all sleep, and nobody is left to wake them");
    for (int rank = 0; rank < world_; ++rank) {
      if (ended && state.sleepers[rank] != 0) fail(world_, "a sleeper is counted after the end");
    }
  }

  const Access& access(const State& state, int rank) const {
    return automata_[rank].access(state.node[rank]);
  }

  bool at_once(const State& state, int rank) const {
    const Access& access = this->access(state, rank);
    switch (access.kind) {
      case Access::kWrite:
      case Access::kRead:
      case Access::kWake:
      case Access::kDropSleeper:
        return true;
      case Access::kLoadFlag:
        return seen_at(state, access.owner, oldest(state, rank, access)).value >= access.value;
      default:
        return false;
    }
  }

  static const Store& seen_at(const State& state, int owner, int store) {
    return state.recent[owner][store % kRecent];
  }

  // Every outcome of the rank's next access, or the first one.
  void step(const State& state, int rank, bool only_first) {
    const Access access = this->access(state, rank);
    const int owner = access.owner;
    State next = state;
    switch (access.kind) {
      case Access::kLoadFlag:
        for (int store = oldest(state, rank, access); store <= state.stores[owner]; ++store) {
          next = state;
          next.seen[rank][owner] = std::max(next.seen[rank][owner], static_cast<uint8_t>(store));
          const Store& what = seen_at(state, owner, store);
          if (access.order != std::memory_order_relaxed) {
            for (int p = 0; p < world_; ++p) {
              next.clock[rank][p] = std::max(next.clock[rank][p], what.clock[p]);
            }
          }
          go(next, rank, rank, what.value);
          if (only_first) return;
        }
        return;
      case Access::kStoreFlag:
        publish(next, rank, access);
        return go(next, rank, rank, 0);
      case Access::kAddSleeper:
        if (++next.sleepers[owner] >= world_) fail(rank, "a sleeper was counted twice");
        return go(next, rank, rank, 0);
      case Access::kDropSleeper:
        --next.sleepers[owner];
        return go(next, rank, rank, 0);
      case Access::kLoadSleepers:
        if (access.order != std::memory_order_seq_cst && state.sleepers[owner] != 0) {
          go(next, rank, rank, 0);  // it may not see them yet
          next = state;
        }
        return go(next, rank, rank, state.sleepers[owner]);
      case Access::kSleep:
        for (int store = oldest(state, rank, access); store <= state.stores[owner]; ++store) {
          next = state;
          const uint8_t value = seen_at(state, owner, store).value;
          if (access.value == value || access.value == kWhatever) {
            next.asleep[rank] = static_cast<int8_t>(owner);
            add(next, at_, rank);
          } else {
            go(next, rank, rank, 0);
          }
        }
        return;
      case Access::kWake:
        for (int sleeper = 0; sleeper < world_; ++sleeper) {
          if (next.asleep[sleeper] != owner) continue;
          next.asleep[sleeper] = -1;
          next.node[sleeper] = automata_[sleeper].after(next.node[sleeper], 0);
          if (options_.wakes_one) break;
        }
        return go(next, rank, rank, 0);
      case Access::kWrite:
        for (int reader = 0; reader < world_; ++reader) {
          if (next.read[rank][access.slot][reader] > next.clock[rank][reader]) {
            fail(rank, "a race: rank " + std::to_string(reader) + " may still read the slot");
          }
        }
        next.words[rank][access.slot][access.word] = access.value;
        next.written[rank][access.slot] = next.clock[rank][rank];
        return go(next, rank, rank, 0);
      case Access::kRead:
        if (next.written[owner][access.slot] > next.clock[rank][owner]) {
          fail(rank, "a race: the slot may not be written yet, or be written again");
        }
        if (next.words[owner][access.slot][access.word] != access.value) {
          fail(rank, "reads what was written for step " +
                         std::to_string(next.words[owner][access.slot][access.word]));
        }
        next.read[owner][access.slot][rank] = next.clock[rank][rank];
        return go(next, rank, rank, 0);
      case Access::kEnd:
        return;
    }
  }

  // The number of the oldest store that a look at the flag may see.
  int oldest(const State& state, int rank, const Access& access) const {
    const int owner = access.owner;
    int oldest = std::max(state.seen[rank][owner], state.clock[rank][owner]);
    if (owner == rank) oldest = state.stores[owner];
    oldest = std::max({oldest, 0, state.stores[owner] - kRecent + 1});
    if (access.order == std::memory_order_seq_cst) {
      for (int store = state.stores[owner]; store > oldest; --store) {
        if (seen_at(state, owner, store).sequential) oldest = store;
      }
    }
    return oldest;
  }

  void publish(State& next, int rank, const Access& access) {
    Store& store = next.recent[rank][++next.stores[rank] % kRecent];
    store.value = access.value;
    store.sequential = access.order == std::memory_order_seq_cst;
    const bool releases = access.order != std::memory_order_relaxed;
    for (int p = 0; p < world_; ++p) store.clock[p] = releases ? next.clock[rank][p] : 0;
    ++next.clock[rank][rank];
    for (int other = 0; other < world_; ++other) {
      if (other < world_ && next.stores[other] + options_.most_ahead < next.stores[rank]) {
        fail(rank, "is too far ahead of rank " + std::to_string(other));
      }
    }
  }

  // What nobody can tell any more is made equal, so that fewer states differ.
  void forget(State& state) const {
    for (int owner = 0; owner < world_; ++owner) {
      int oldest = state.stores[owner];
      for (int rank = 0; rank < world_; ++rank) {
        if (rank == owner) continue;
        uint8_t& seen = state.seen[rank][owner];
        seen = std::max(seen, state.clock[rank][owner]);
        oldest = std::min<int>(oldest, seen);
      }
      for (int store = state.stores[owner] - kRecent + 1; store < oldest; ++store) {
        const int place = (store + kRecent) % kRecent;
        std::memset(&state.recent[owner][place], 0, sizeof(Store));
        state.recent[owner][place].sequential = 1;
      }
      for (int slot = 0; slot < 2; ++slot) {
        for (int rank = 0; rank < world_; ++rank) {
          uint8_t& read = state.read[owner][slot][rank];
          if (read <= state.clock[owner][rank]) read = 0;
        }
      }
    }
  }

  // `rank` goes on with the answer.
  void go(State& next, int rank, int mover, uint8_t answer) {
    next.node[rank] = automata_[rank].after(next.node[rank], answer);
    add(next, at_, mover);
  }

  void add(State& state, size_t from, int mover) {
    if (!error_.empty()) return;
    forget(state);
    if (2 * (states_.size() + 1) > table_.size()) grow();
    for (size_t place = hash_of(state);; ++place) {
      uint32_t& entry = table_[place & (table_.size() - 1)];
      if (entry != 0 && !(states_[entry - 1] == state)) continue;
      if (entry != 0) return;
      states_.push_back(state);
      from_.push_back({static_cast<uint32_t>(from), static_cast<uint8_t>(mover)});
      entry = static_cast<uint32_t>(states_.size());
      return;
    }
  }

  void grow() {
    std::vector<uint32_t> larger(table_.size() * 4);
    for (uint32_t index = 0; index < states_.size(); ++index) {
      size_t place = hash_of(states_[index]);
      while (larger[place & (larger.size() - 1)] != 0) ++place;
      larger[place & (larger.size() - 1)] = index + 1;
    }
    table_.swap(larger);
  }

  void fail(int rank, const std::string& what) {
    if (!error_.empty()) return;
    error_ = rank < world_ ? "rank " + std::to_string(rank) + ": " + what : what;
    if (rank < world_) last_ = describe(states_[at_], rank);
  }

  std::string describe(const State& state, int rank) const {
    const std::string text = "  rank " + std::to_string(rank) + " ";
    return text + (state.asleep[rank] >= 0 ? "wakes by itself" : access(state, rank).text()) + "\n";
  }

  std::string schedule() const {
    std::string text = last_;
    for (size_t at = at_; at != 0; at = from_[at].state) {
      text.insert(0, describe(states_[from_[at].state], from_[at].mover));
    }
    return text;
  }

  struct From {
    uint32_t state;
    uint8_t mover;
  };
  const SearchOptions options_;
  const int world_;
  std::vector<Automaton> automata_;
  std::vector<State> states_;  // in the order in which they were found
  std::vector<From> from_;
  std::vector<uint32_t> table_;  // open addressing: index into states_, plus 1
  size_t at_ = 0;
  std::string error_, last_;
};

}  // namespace

SearchResult search(const std::vector<Program>& programs, const SearchOptions& options) {
  return Search(programs, options).run();
}

}  // namespace tpkernels::model
