// Which units of a sharded model are used next: orders recorded of earlier passes. The same machine
// as tpkernels/reference/use_order.py, which says more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace tpkernels {

// Between which events a step is.
enum class Phase { kIdle, kForward, kBackward };

class UseOrder {
 public:
  static constexpr size_t kRecordedOrders = 4;    // of each mode: branches that alternate
  static constexpr int kAlternatesFrom = 2;       // changes of order in a row
  static constexpr size_t kPendingForwards = 16;  // until a backward comes; of others the last

  explicit UseOrder(int units);

  Phase phase() const { return phase_; }
  // Whether a forward runs that a backward may follow.
  bool trains() const { return pass_.trains; }
  // Whether `unit` was used in the pass that runs.
  bool was_used(int unit) const { return used_[unit] > 0; }
  // The units expected from here on, the nearest use first.
  const std::vector<int>& upcoming() const { return upcoming_; }
  // The place of `unit` among them, or their number.
  int place(int unit) const { return place_[unit]; }
  bool is_expected(int unit) const { return place(unit) < static_cast<int>(upcoming_.size()); }

  void begin_forward(const std::string& mode, bool trains);
  void end_forward();
  void begin_backward();
  void end_backward();
  void use(int unit);
  // The weights changed: of the forwards so far none can follow.
  void expect_no_backward();
  // No pass runs, and no backward is to come.
  void expect_nothing();

 private:
  using Order = std::vector<int>;

  // The forward or backward that runs: what was used so far, and what is expected.
  struct Pass {
    std::string mode;
    bool trains = false;
    Order history;
    Order order;
    int position = -1;
  };
  struct Known {
    Order order;
    Order follower;  // which one followed the last time, or none: of branches that alternate
  };
  struct Mode {
    std::string name;
    std::deque<Known> orders;  // the newest last
    int changes = 0;           // passes in a row that changed the order
  };
  struct Backward {
    std::deque<Order> forwards;  // after just these
    Order order;
  };

  void begin(Phase phase, Pass pass);
  const Mode* find_mode(const std::string& name) const;
  Order expected(const std::string& mode) const;
  // Appends, to `out`, the backward of the pending forwards, and of `last` after them if given.
  void append_backward(const Order* last, Order& out) const;
  bool follows(const Backward& backward, const Order* last) const;
  void locate(int unit);
  void predict();

  int units_;
  Phase phase_ = Phase::kIdle;
  Pass pass_;
  std::vector<Mode> modes_;  // the newest last
  std::deque<Backward> backwards_;
  std::deque<Order> forwards_;  // whose backward has not come
  std::vector<int> used_;       // how often each unit was, in the pass that runs
  std::vector<int> upcoming_;
  std::vector<int> place_;
  // Of predict(), kept for their memory.
  std::vector<int> left_;
  Order rest_, forward_;
};

}  // namespace tpkernels
