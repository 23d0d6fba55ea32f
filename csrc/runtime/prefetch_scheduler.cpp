#include "runtime/prefetch_scheduler.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace tpkernels {
namespace {

void check_units(const std::vector<UnitBytes>& units) {
  __int128 total = 0;
  for (size_t index = 0; index < units.size(); ++index) {
    const UnitBytes& unit = units[index];
    const std::pair<const char*, int64_t> sizes[] = {{"gathered", unit.gathered},
                                                     {"staging", unit.staging},
                                                     {"gradients", unit.gradients},
                                                     {"reduce_input", unit.reduce_input}};
    for (const auto& [name, value] : sizes) {
      if (value < 0) {
        throw std::invalid_argument("units[" + std::to_string(index) + "]." + name + " is " +
                                    std::to_string(value) + ", allowed is 0 or more");
      }
      total += value;
    }
  }
  if (total > PrefetchScheduler::kUnlimited) {
    throw std::invalid_argument("units have more than 2**62 bytes together, allowed are 2**62");
  }
}

void check_bound(const char* name, int64_t value) {
  if (value < 0 || value > PrefetchScheduler::kUnlimited) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                ", allowed are 0 to 2**62. Fix: 2**62 stands for no bound");
  }
}

void check_bounds(int64_t prefetch_bytes, int64_t max_live_bytes) {
  check_bound("prefetch_bytes", prefetch_bytes);
  check_bound("max_live_bytes", max_live_bytes);
}

}  // namespace

void PrefetchScheduler::Totals::add(const Unit& unit, int64_t sign) {
  if (unit.is_idle()) idle += sign * unit.cost();
  if (unit.gathered) gathered += sign * unit.cost();
  if (unit.uses) gradients_to_come += sign * unit.gradients_to_come();
  if (unit.collecting) gradients += sign * unit.bytes.gradients;
  if (unit.reducing) gradients += sign * (unit.bytes.gradients + unit.bytes.reduce_input);
}

PrefetchScheduler::PrefetchScheduler(const std::vector<UnitBytes>& units, int64_t prefetch_bytes,
                                     int64_t max_live_bytes, int64_t max_pending_reduces,
                                     bool reshard_after_backward)
    : prefetch_bytes_(prefetch_bytes),
      max_live_bytes_(max_live_bytes),
      max_pending_reduces_(static_cast<size_t>(max_pending_reduces)),
      reshard_after_backward_(reshard_after_backward),
      order_(static_cast<int>(units.size())),
      is_wanted_(units.size()) {
  check_units(units);
  check_bounds(prefetch_bytes, max_live_bytes);
  if (max_pending_reduces < 1) {
    throw std::invalid_argument("max_pending_reduces is " + std::to_string(max_pending_reduces) +
                                ", allowed is 1 or more. Fix: 1 waits for each reduce-scatter "
                                "before the next");
  }
  units_.resize(units.size());
  for (size_t index = 0; index < units.size(); ++index) {
    units_[index].bytes = units[index];
  }
}

// --- events ---

PrefetchScheduler::Actions PrefetchScheduler::begin_forward(const std::string& mode, bool trains) {
  order_.begin_forward(mode, trains);
  settle();
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::end_forward() {
  const bool trains = order_.trains();
  order_.end_forward();
  for (int index = 0; index < static_cast<int>(units_.size()); ++index) {
    change(index, [](Unit& unit) { unit.held_for_forward = false; });
  }
  settle(/*drop_unwanted=*/true, /*gather=*/trains);
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::begin_backward() {
  order_.begin_backward();
  settle();
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::end_backward() {
  order_.end_backward();
  for (int index = 0; index < static_cast<int>(units_.size()); ++index) {
    change(index, [](Unit& unit) { unit.held_for_backward = false; });
  }
  wait_for_reduces(0);
  settle(/*drop_unwanted=*/true);
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::use(int64_t which, bool record) {
  const int index = checked(which);
  Unit& unit = units_[index];
  const bool was_ready = unit.is_ready();
  if (!(was_ready && (unit.uses || unit.is_held() || unit.bytes.resident))) {
    ++(was_ready ? unit.counters.hits : unit.counters.misses);
    ++(was_ready ? counters_.hits : counters_.misses);
  }
  if (record && order_.phase() != Phase::kIdle) order_.use(index);
  change(index, [](Unit& unit) { ++unit.uses; });
  if (!was_ready) {
    make_room(unit.need());
    gather(index);
  }
  unit.touched = true;
  if (record) settle();
  wait(index);
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::release(int64_t which) {
  const int index = checked(which);
  const Unit& unit = units_[index];
  if (unit.uses == 0) {
    throw std::invalid_argument("unit " + std::to_string(index) +
                                " is released more often than used");
  }
  change(index, [](Unit& unit) { --unit.uses; });
  if (unit.uses == 0) {
    // A use by hand or a recomputation changes no hold.
    if (order_.was_used(index)) {
      change(index, [this](Unit& unit) {
        if (order_.phase() == Phase::kForward) {
          unit.held_for_backward |= unit.bytes.held && order_.trains();
          unit.held_for_forward = false;
        } else {
          unit.held_for_backward = false;
          unit.held_for_forward = !reshard_after_backward_;
        }
      });
    }
    if (!unit.fresh) drop_holds(index);
    if (unit.is_idle()) {
      find_wanted();
      if (!unit.fresh || !is_wanted_[index]) free(index);
    }
    settle();
  }
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::collect(int64_t which) {
  const int index = checked(which);
  const Unit& unit = units_[index];
  if (!unit.collecting) {
    // An earlier part of it is still on its way.
    while (unit.reducing) wait_for_reduces(pending_reduces_.size() - 1);
    make_room(unit.bytes.gradients);
    change(index, [](Unit& unit) { unit.collecting = true; });
  }
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::reduce(int64_t which) {
  const int index = checked(which);
  if (!units_[index].collecting) {
    throw std::invalid_argument("unit " + std::to_string(index) + " has collected no gradients");
  }
  wait_for_reduces(max_pending_reduces_ - 1);
  make_room(units_[index].bytes.reduce_input);
  change(index, [](Unit& unit) {
    unit.collecting = false;
    unit.reducing = true;
  });
  pending_reduces_.push_back(index);
  actions_.push_back({ActionKind::kReduce, index});
  note_peaks();
  make_room(0);  // where it did not fit, it is waited for at once
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::invalidate() {
  order_.expect_no_backward();
  std::vector<int64_t> all(units_.size());
  std::iota(all.begin(), all.end(), 0);
  return invalidate(all);
}

PrefetchScheduler::Actions PrefetchScheduler::invalidate(const std::vector<int64_t>& indices) {
  for (const int64_t index : indices) checked(index);
  for (const int64_t each : indices) {
    const int index = static_cast<int>(each);
    units_[index].fresh = false;
    drop_holds(index);
    if (units_[index].is_idle()) free(index);
  }
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::set_budget(int64_t prefetch_bytes,
                                                         int64_t max_live_bytes) {
  check_bounds(prefetch_bytes, max_live_bytes);
  prefetch_bytes_ = prefetch_bytes;
  max_live_bytes_ = max_live_bytes;
  make_room(0);
  settle();
  return take();
}

PrefetchScheduler::Actions PrefetchScheduler::reset(bool forget) {
  wait_for_reduces(0);
  for (int index = 0; index < static_cast<int>(units_.size()); ++index) {
    change(index, [](Unit& unit) {
      unit.uses = 0;
      unit.collecting = false;
    });
    drop_holds(index);
    if (units_[index].is_idle()) {
      free(index);
    } else if (units_[index].gathered) {
      wait(index);
    }
  }
  order_.expect_nothing();
  if (forget) {
    order_ = UseOrder(static_cast<int>(units_.size()));
  }
  return take();
}

// --- admission ---

int PrefetchScheduler::checked(int64_t index) const {
  if (index < 0 || index >= static_cast<int64_t>(units_.size())) {
    throw std::invalid_argument("unit " + std::to_string(index) + " is unknown, there are " +
                                std::to_string(units_.size()) + ", from 0");
  }
  return static_cast<int>(index);
}

template <typename Change>
void PrefetchScheduler::change(int index, Change&& how) {
  Unit& unit = units_[index];
  totals_.add(unit, -1);
  how(unit);
  totals_.add(unit, +1);
}

void PrefetchScheduler::drop_holds(int index) {
  change(index, [](Unit& unit) { unit.held_for_backward = unit.held_for_forward = false; });
}

void PrefetchScheduler::find_wanted() {
  for (const int index : wanted_) is_wanted_[index] = false;
  wanted_.clear();
  const bool backward = order_.phase() == Phase::kBackward;
  int64_t room = prefetch_bytes_;
  int64_t live_room = max_live_bytes_ - (live_bytes() - idle_bytes());
  if (backward) live_room -= totals_.gradients_to_come;  // those in use will soon have them
  for (const int index : order_.upcoming()) {
    const Unit& unit = units_[index];
    // Never prefetched; those behind it are.
    if (unit.bytes.gathered + unit.bytes.staging > prefetch_bytes_) continue;
    if (stays(unit)) continue;
    const int64_t need = unit.bytes.resident ? unit.need() : unit.cost();
    int64_t live_need = 0;  // one in use is needed again: room to keep it when it is released
    if (!unit.uses) live_need = need + (backward ? unit.gradients_to_come() : 0);
    if (need > room || live_need > live_room) break;
    room -= need;
    live_room -= live_need;
    if (!unit.uses) {
      wanted_.push_back(index);
      is_wanted_[index] = true;
    }
  }
}

// Whether it is, or when released will be, gathered without being idle.
bool PrefetchScheduler::stays(const Unit& unit) const {
  if (unit.bytes.resident || !unit.uses) {
    return unit.is_ready() && (unit.is_held() || unit.bytes.resident);
  }
  if (order_.phase() == Phase::kForward) return unit.bytes.held && order_.trains();
  return order_.phase() == Phase::kBackward && !reshard_after_backward_;
}

// Idle units, the one whose use is farthest or not expected last.
std::vector<int> PrefetchScheduler::idle_units(bool wanted_too) const {
  std::vector<int> idle;
  for (int index = 0; index < static_cast<int>(units_.size()); ++index) {
    if (units_[index].is_idle() && (wanted_too || !is_wanted_[index])) idle.push_back(index);
  }
  std::sort(idle.begin(), idle.end(), [this](int a, int b) {
    return std::pair(order_.place(a), a) < std::pair(order_.place(b), b);
  });
  return idle;
}

// Frees what is over budget, then gathers ahead what fits.
void PrefetchScheduler::settle(bool drop_unwanted, bool gather_wanted) {
  if (drop_unwanted) {
    for (int index = 0; index < static_cast<int>(units_.size()); ++index) {
      // WAR: its gather reads weights that may change now.
      if (units_[index].bytes.resident && units_[index].gathered) wait(index);
    }
  }
  find_wanted();
  std::vector<int> unwanted = idle_units(/*wanted_too=*/false);
  const auto free_farthest = [&] {
    free(unwanted.back());
    unwanted.pop_back();
  };
  while (!unwanted.empty() && (drop_unwanted || is_over())) free_farthest();
  if (!gather_wanted) return;
  for (const int index : wanted_) {
    if (units_[index].is_ready()) continue;
    while (!unwanted.empty() && is_over(units_[index].need())) free_farthest();
    gather(index);
  }
}

bool PrefetchScheduler::is_over(int64_t need) const {
  return idle_bytes() + need > prefetch_bytes_ || is_full(need);
}

// Before `need` bytes more: what costs least to give up goes first.
void PrefetchScheduler::make_room(int64_t need) {
  if (!is_full(need)) return;
  std::vector<int> idle = idle_units(/*wanted_too=*/true);
  const auto free_farthest = [&] {
    free(idle.back());
    idle.pop_back();
  };
  while (!idle.empty() && !order_.is_expected(idle.back()) && is_full(need)) free_farthest();
  while (!pending_reduces_.empty() && is_full(need)) wait_for_reduces(pending_reduces_.size() - 1);
  while (!idle.empty() && is_full(need)) free_farthest();
}

void PrefetchScheduler::gather(int index) {
  Unit& unit = units_[index];
  if (unit.gathered) {  // stale, resident or in use
    wait(index);        // WAW: it may still be on its way into this memory
    note_waste(unit);
  }
  change(index, [](Unit& unit) {
    unit.gathered = unit.fresh = true;
    unit.waited = unit.touched = false;
  });
  ++counters_.gathers;
  actions_.push_back({ActionKind::kGather, index});
  note_peaks();
}

void PrefetchScheduler::wait(int index) {
  if (units_[index].waited) return;
  change(index, [](Unit& unit) { unit.waited = true; });
  actions_.push_back({ActionKind::kWait, index});
}

void PrefetchScheduler::free(int index) {
  wait(index);
  note_waste(units_[index]);
  actions_.push_back({ActionKind::kFree, index});
  change(index, [](Unit& unit) { unit.gathered = unit.waited = unit.fresh = false; });
}

void PrefetchScheduler::wait_for_reduces(size_t most) {
  while (pending_reduces_.size() > most) {
    const int index = pending_reduces_.front();
    pending_reduces_.pop_front();
    change(index, [](Unit& unit) { unit.reducing = false; });
    actions_.push_back({ActionKind::kWaitReduce, index});
  }
}

void PrefetchScheduler::note_waste(Unit& unit) {
  if (unit.touched) return;
  ++unit.counters.wasted;
  ++counters_.wasted;
}

void PrefetchScheduler::note_peaks() {
  counters_.peak_idle_bytes = std::max(counters_.peak_idle_bytes, idle_bytes());
  counters_.peak_gathered_bytes = std::max(counters_.peak_gathered_bytes, gathered_bytes());
  counters_.peak_live_bytes = std::max(counters_.peak_live_bytes, live_bytes());
}

PrefetchScheduler::Actions PrefetchScheduler::take() {
  note_peaks();
  return std::exchange(actions_, {});
}

}  // namespace tpkernels
