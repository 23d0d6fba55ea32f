// What a rank says it is about to do, so that ranks that do different things are told so.
#pragma once

#include <cstdint>
#include <string>

namespace tpkernels {

enum class Collective : uint32_t {
  kBarrier,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kGemmAllReduce,
};

enum class ElementType : uint32_t {
  kNone,
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
  kByte,  // of a type that is only moved
};

// The last four are for signatures alone: the collectives do not know them.
enum class Reduction : uint32_t { kNone, kSum, kAvg, kMax, kMin, kProduct, kBand, kBor, kBxor };

// The bytes of one element; 1 for kNone.
int64_t bytes_of(ElementType type);

// Compared bit by bit between ranks: every rank gives the same. Sizes of 1 are left out of `dims`.
struct Signature {
  static constexpr int kMaxDims = 8;

  Collective collective = Collective::kBarrier;
  ElementType type = ElementType::kNone;
  Reduction reduction = Reduction::kNone;
  int32_t root = -1;
  uint32_t dim_count = 0;  // as given; dims holds the first kMaxDims, the rest is in the digest
  uint32_t reserved = 0;
  int64_t dims[kMaxDims] = {};
  uint64_t digest = 0;  // of all else that must agree: more dims, sizes by rank

  void add_dim(int64_t size);      // a size of 1 does not count
  void add_detail(int64_t value);  // into the digest
  bool operator==(const Signature&) const = default;
  // "all_reduce(sum) of float32 [3, 4]"
  std::string text() const;
};
static_assert(sizeof(Signature) == 96);

// "all_reduce", as the operation is called in PyTorch.
const char* name_of(Collective collective);

}  // namespace tpkernels
