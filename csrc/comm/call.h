// What the collectives have in common: what a call tells the other ranks, and how its elements are
// cut into steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/collectives.h"
#include "comm/slot_ring.h"
#include "kernels/reduce_cpu.h"

namespace tpkernels {

// Elements or bytes [begin, begin + size).
struct Range {
  int64_t begin;
  int64_t size;
};

// The `index`-th of the ranges of `each` that [0, total) is cut into; empty beyond the last.
constexpr Range range_of(int64_t total, int64_t each, int64_t index) {
  const int64_t begin = std::min(index * each, total);
  return {begin, std::min(each, total - begin)};
}

// Of a call where every rank gives the same `count`.
Signature signature_of(Collective collective, ElementType type, Reduction reduction, int root,
                       int64_t count, const CallOptions& options);
// Of a call with a count for each rank, the same list on all.
Signature signature_of(Collective collective, ElementType type, Reduction reduction, int root,
                       std::span<const int64_t> counts, const CallOptions& options);

// Throws std::invalid_argument unless there is one size for each rank.
void check_size(const PeerGroup& group, const char* name, size_t size);
// Throws std::invalid_argument unless `root` is a rank of the group.
void check_root(const PeerGroup& group, int root);

// The loops for a reduction that can_reduce. Throws std::invalid_argument.
ReduceFunction reduce_function(ElementType type, Reduction reduction);

inline const std::byte* bytes_at(const void* base, int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}
inline std::byte* bytes_at(void* base, int64_t offset) {
  return static_cast<std::byte*>(base) + offset;
}

// A value for each rank; off the heap in groups of up to 16.
template <typename Value>
class ByRank {
 public:
  explicit ByRank(int world) : more_(world > kFew ? world : 0) {}
  Value& operator[](int rank) { return data()[rank]; }
  Value* data() { return more_.empty() ? few_ : more_.data(); }

 private:
  static constexpr int kFew = 16;
  Value few_[kFew];
  std::vector<Value> more_;
};

}  // namespace tpkernels
