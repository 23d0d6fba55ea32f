#include "runtime/use_order.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace tpkernels {
namespace {

int common_suffix(const std::vector<int>& order, int place, const std::vector<int>& history) {
  const int most = std::min(place + 1, static_cast<int>(history.size()));
  const int last = static_cast<int>(history.size()) - 1;
  int length = 0;
  while (length < most && order[place - length] == history[last - length]) ++length;
  return length;
}

}  // namespace

UseOrder::UseOrder(int units) : units_(units), used_(units), place_(units), left_(units) {}

void UseOrder::begin_forward(const std::string& mode, bool trains) {
  begin(Phase::kForward, {mode, trains, {}, expected(mode), -1});
}

void UseOrder::end_forward() {
  if (!pass_.history.empty()) {
    Mode mode{pass_.mode, {}, 0};
    const auto known = std::find_if(modes_.begin(), modes_.end(),
                                    [&](const Mode& each) { return each.name == pass_.mode; });
    if (known != modes_.end()) {
      mode = std::move(*known);
      modes_.erase(known);
    }
    if (!mode.orders.empty()) {
      Known& newest = mode.orders.back();
      newest.follower = pass_.history;
      mode.changes = newest.order != pass_.history ? mode.changes + 1 : 0;
    }
    Known now{pass_.history, {}};
    const auto same = std::find_if(mode.orders.begin(), mode.orders.end(),
                                   [&](const Known& each) { return each.order == now.order; });
    if (same != mode.orders.end()) {
      now = std::move(*same);
      mode.orders.erase(same);
    }
    mode.orders.push_back(std::move(now));
    if (mode.orders.size() > kRecordedOrders) mode.orders.pop_front();
    modes_.push_back(std::move(mode));  // the newest mode last, too
  }
  if (pass_.trains) {
    forwards_.push_back(pass_.history);
    if (forwards_.size() > kPendingForwards) forwards_.pop_front();
  }
  Pass pass;
  if (!forwards_.empty()) append_backward(nullptr, pass.order);
  begin(Phase::kIdle, std::move(pass));
}

void UseOrder::begin_backward() {
  Pass pass;
  append_backward(nullptr, pass.order);
  begin(Phase::kBackward, std::move(pass));
}

void UseOrder::end_backward() {
  if (!pass_.history.empty()) {
    std::erase_if(backwards_, [&](const Backward& each) { return each.forwards == forwards_; });
    backwards_.push_back({forwards_, pass_.history});
    if (backwards_.size() > kRecordedOrders) backwards_.pop_front();
  }
  expect_nothing();
}

void UseOrder::use(int unit) {
  pass_.history.push_back(unit);
  ++used_[unit];
  locate(unit);
  predict();
}

void UseOrder::expect_no_backward() {
  if (phase_ == Phase::kIdle) {
    expect_nothing();
  } else if (phase_ == Phase::kForward) {
    forwards_.clear();
    predict();
  }
}

void UseOrder::expect_nothing() {
  forwards_.clear();
  begin(Phase::kIdle, {});
}

void UseOrder::begin(Phase phase, Pass pass) {
  phase_ = phase;
  pass_ = std::move(pass);
  std::fill(used_.begin(), used_.end(), 0);
  predict();
}

const UseOrder::Mode* UseOrder::find_mode(const std::string& name) const {
  for (const Mode& mode : modes_) {
    if (mode.name == name) return &mode;
  }
  return nullptr;
}

// The newest of `mode`, or what followed it before where orders alternate: where the last two
// passes both changed the order. Of an unknown mode that of the newest mode.
UseOrder::Order UseOrder::expected(const std::string& mode) const {
  const Mode* known = find_mode(mode);
  if (!known && !modes_.empty()) known = &modes_.back();
  if (!known) {
    Order all(units_);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  const Known& newest = known->orders.back();
  const bool alternates = known->changes >= kAlternatesFrom && !newest.follower.empty();
  return alternates ? newest.follower : newest.order;
}

bool UseOrder::follows(const Backward& backward, const Order* last) const {
  const std::deque<Order>& key = backward.forwards;
  return key.size() == forwards_.size() + (last ? 1 : 0) && (!last || key.back() == *last) &&
         std::equal(forwards_.begin(), forwards_.end(), key.begin());
}

void UseOrder::append_backward(const Order* last, Order& out) const {
  for (const Backward& backward : backwards_) {
    if (follows(backward, last)) {
      out.insert(out.end(), backward.order.begin(), backward.order.end());
      return;
    }
  }
  if (last) out.insert(out.end(), last->rbegin(), last->rend());
  for (auto forward = forwards_.rbegin(); forward != forwards_.rend(); ++forward) {
    out.insert(out.end(), forward->rbegin(), forward->rend());
  }
}

// Finds where in which known order the last use stands.
void UseOrder::locate(int unit) {
  const int next = pass_.position + 1;
  if (next < static_cast<int>(pass_.order.size()) && pass_.order[next] == unit) {
    pass_.position = next;
    return;
  }
  using Score = std::tuple<int, int, int>;  // (context, -which order, -distance)
  Score best{-1, 0, 0};
  const Order* found = nullptr;
  int found_place = 0;
  const auto search = [&](const Order& order, int which) {
    const int size = static_cast<int>(order.size());
    for (int place = 0; place < size; ++place) {
      if (order[place] != unit) continue;
      const int ahead = place > pass_.position ? place - pass_.position : size + place;
      const Score score{common_suffix(order, place, pass_.history), -which, -ahead};
      if (score > best) {
        best = score;
        found = &order;
        found_place = place;
      }
    }
  };
  search(pass_.order, 0);
  if (phase_ == Phase::kForward) {
    if (const Mode* mode = find_mode(pass_.mode)) {
      int which = 0;
      for (auto known = mode->orders.rbegin(); known != mode->orders.rend(); ++known) {
        if (known->order != pass_.order) search(known->order, ++which);
      }
    }
  }
  if (!found) return;
  if (found != &pass_.order) pass_.order = *found;
  pass_.position = found_place;
}

void UseOrder::predict() {
  const Order& order = pass_.order;
  for (int unit = 0; unit < units_; ++unit) left_[unit] = -used_[unit];
  for (const int unit : order) ++left_[unit];
  rest_.clear();
  const int size = static_cast<int>(order.size());
  for (int i = 0, place = pass_.position; i < size; ++i) {
    if (++place == size) place = 0;  // what was passed over may still come
    if (left_[order[place]] > 0) {
      --left_[order[place]];
      rest_.push_back(order[place]);
    }
  }
  if (pass_.trains) {
    forward_ = pass_.history;
    forward_.insert(forward_.end(), rest_.begin(), rest_.end());
    append_backward(&forward_, rest_);
  }
  upcoming_.clear();
  std::fill(place_.begin(), place_.end(), -1);
  for (const int unit : rest_) {
    if (place_[unit] >= 0) continue;
    place_[unit] = static_cast<int>(upcoming_.size());
    upcoming_.push_back(unit);
  }
  for (int& place : place_) {
    if (place < 0) place = static_cast<int>(upcoming_.size());
  }
}

}  // namespace tpkernels
