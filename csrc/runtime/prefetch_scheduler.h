// When to gather, wait for, keep and free the units of a sharded model. The same machine as
// tpkernels/reference/prefetch_scheduler.py, the specification, which says more: the same events
// give the same actions, counters and errors (std::invalid_argument).
//
// Pure logic: no tensors, no clock, no threads. An event takes time linear in the number of units.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "runtime/use_order.h"

namespace tpkernels {

// What the caller is to do with a unit.
enum class ActionKind {
  kGather,      // start its all-gather; of a stale copy: into the same memory
  kWait,        // let the compute wait for its all-gather
  kFree,        // its gathered copy is not needed
  kReduce,      // start the reduce-scatter of its gradients
  kWaitReduce,  // wait for that, and free the buffers
};

struct Action {
  ActionKind kind;
  int unit;
  bool operator==(const Action&) const = default;
};

// What one unit is charged, in bytes.
struct UnitBytes {
  int64_t gathered = 0;      // the whole unit in the dtype it computes in
  int64_t staging = 0;       // what its all-gather holds besides, until it is complete
  int64_t gradients = 0;     // from the first one until they are reduced
  int64_t reduce_input = 0;  // what its reduce-scatter holds besides, while in flight
  bool resident = false;     // once gathered it stays so and counts as in use
  bool held = false;         // it counts as in use from forward to backward
};

// Totals since the start; bytes are peaks.
struct SchedulerCounters {
  int64_t gathers = 0;
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t wasted = 0;
  int64_t peak_idle_bytes = 0;
  int64_t peak_live_bytes = 0;
  int64_t peak_gathered_bytes = 0;
};

struct UnitCounters {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t wasted = 0;
};

class PrefetchScheduler {
 public:
  using Actions = std::vector<Action>;

  static constexpr int64_t kUnlimited = int64_t{1} << 62;  // of bytes; sums stay below 2^63

  explicit PrefetchScheduler(const std::vector<UnitBytes>& units, int64_t prefetch_bytes,
                             int64_t max_live_bytes = kUnlimited, int64_t max_pending_reduces = 2,
                             bool reshard_after_backward = true);

  Actions begin_forward(const std::string& mode, bool trains);
  Actions end_forward();
  Actions begin_backward();
  Actions end_backward();
  Actions use(int64_t index, bool record = true);
  Actions release(int64_t index);
  Actions collect(int64_t index);
  Actions reduce(int64_t index);
  Actions invalidate();  // all
  Actions invalidate(const std::vector<int64_t>& indices);
  Actions set_budget(int64_t prefetch_bytes, int64_t max_live_bytes = kUnlimited);
  Actions reset(bool forget = false);

  int64_t idle_bytes() const { return totals_.idle; }
  int64_t gathered_bytes() const { return totals_.gathered; }
  int64_t live_bytes() const { return totals_.gathered + totals_.gradients; }
  const SchedulerCounters& counters() const { return counters_; }
  UnitCounters unit_counters(int64_t index) const { return units_[checked(index)].counters; }
  bool is_gathered(int64_t index) const { return units_[checked(index)].gathered; }

 private:
  struct Unit {
    UnitBytes bytes;
    bool gathered = false;
    bool waited = false;   // the staging bytes are free again
    bool fresh = false;    // of the newest weights
    bool touched = false;  // used since it was gathered
    int64_t uses = 0;
    bool held_for_backward = false;
    bool held_for_forward = false;
    bool collecting = false;  // gradient bytes are charged
    bool reducing = false;
    UnitCounters counters;

    bool is_ready() const { return gathered && fresh; }
    bool is_held() const { return held_for_backward || held_for_forward; }
    bool is_idle() const { return gathered && !uses && !is_held() && !bytes.resident; }
    // Bytes of the gathered copy, now or if it were gathered next.
    int64_t cost() const { return bytes.gathered + (gathered && waited ? 0 : bytes.staging); }
    // Bytes that its next gather adds.
    int64_t need() const { return !gathered ? cost() : waited ? bytes.staging : 0; }
    int64_t gradients_to_come() const { return collecting || reducing ? 0 : bytes.gradients; }
  };

  // Sums over all units, kept up to date by change().
  struct Totals {
    int64_t idle = 0;
    int64_t gathered = 0;
    int64_t gradients = 0;          // and reduce-scatter inputs
    int64_t gradients_to_come = 0;  // of the units in use

    void add(const Unit& unit, int64_t sign);
  };

  int checked(int64_t index) const;
  template <typename Change>
  void change(int index, Change&& how);
  void drop_holds(int index);

  void find_wanted();
  bool stays(const Unit& unit) const;
  std::vector<int> idle_units(bool wanted_too) const;
  void settle(bool drop_unwanted = false, bool gather = true);
  bool is_over(int64_t need = 0) const;
  bool is_full(int64_t need) const { return live_bytes() + need > max_live_bytes_; }
  void make_room(int64_t need);

  void gather(int index);
  void wait(int index);
  void free(int index);
  void wait_for_reduces(size_t most);
  void note_waste(Unit& unit);
  void note_peaks();
  Actions take();

  std::vector<Unit> units_;
  int64_t prefetch_bytes_;
  int64_t max_live_bytes_;
  size_t max_pending_reduces_;
  bool reshard_after_backward_;
  UseOrder order_;
  std::deque<int> pending_reduces_;
  Actions actions_;
  Totals totals_;
  SchedulerCounters counters_;
  // The units that should be gathered now though not in use, the nearest use first.
  std::vector<int> wanted_;
  std::vector<bool> is_wanted_;
};

}  // namespace tpkernels
