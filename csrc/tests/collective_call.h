// One call of a collective, made with known values and checked bit for bit, one element at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/collectives.h"
#include "tests/reduce_reference.h"

namespace tpkernels::testing {

// One call, the same on every rank. Where each rank has a count, they are counts_of(call, world).
struct Call {
  Collective collective = Collective::kAllReduce;
  ElementType type = ElementType::kFloat32;
  Reduction reduction = Reduction::kSum;
  int64_t count = 0;
  bool uneven = false;
  bool in_place = false;
  int root = 0;
  int shift = 0;  // bytes off every alignment
  uint64_t seed = 0;
  StepSizes sizes = {};
};

inline std::string text_of(const Call& call) {
  return std::string(name_of(call.collective)) + " type " +
         std::to_string(static_cast<int>(call.type)) + " reduction " +
         std::to_string(static_cast<int>(call.reduction)) + " count " + std::to_string(call.count) +
         (call.uneven ? " uneven" : "") + (call.in_place ? " in place" : "") + " root " +
         std::to_string(call.root) + " one_shot " + std::to_string(call.sizes.one_shot);
}

inline int64_t count_of(const Call& call, int rank) {
  if (!call.uneven) return call.count;
  const uint64_t bits = mixed(call.seed, 1000 + rank);
  return bits % 4 == 0 ? 0 : static_cast<int64_t>(bits % static_cast<uint64_t>(call.count + 1));
}

inline std::vector<int64_t> counts_of(const Call& call, int world) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < world; ++rank) counts.push_back(count_of(call, rank));
  return counts;
}

// In all_to_all, from one rank to another.
inline int64_t pair_count(const Call& call, int from, int to) {
  return count_of({.count = call.count, .uneven = call.uneven, .seed = call.seed + 31 * from}, to);
}

// Memory of one tensor, with a border that must stay as it is.
template <typename T>
class Tensor {
 public:
  Tensor(int64_t count, int shift) : count_(count), shift_(shift) {
    memory_.assign(static_cast<size_t>(count) * sizeof(T) + 2 * kBorder, kMark);
  }
  // Element i is value(i).
  template <typename Value>
  Tensor(int64_t count, int shift, Value&& value) : Tensor(count, shift) {
    for (int64_t i = 0; i < count; ++i) {
      const T element = value(i);
      std::memcpy(at(i), &element, sizeof element);
    }
  }

  void* data() { return at(0); }
  template <typename Value>
  void expect(Value&& value, const Call& call, int rank, int part) {
    for (int64_t i = 0; i < count_; ++i) {
      const T expected = value(i);
      if (std::memcmp(at(i), &expected, sizeof expected) != 0) {
        throw std::runtime_error(text_of(call) + ": rank " + std::to_string(rank) + ", part " +
                                 std::to_string(part) + ", element " + std::to_string(i) +
                                 " is wrong");
      }
    }
    for (int64_t i = 0; i < static_cast<int64_t>(memory_.size()); ++i) {
      const int64_t inside = i - kBorder - shift_;
      if ((inside < 0 || inside >= count_ * static_cast<int64_t>(sizeof(T))) &&
          memory_[i] != kMark) {
        throw std::runtime_error(text_of(call) + ": rank " + std::to_string(rank) +
                                 " wrote outside, at byte " + std::to_string(inside));
      }
    }
  }

 private:
  static constexpr int kBorder = 64;
  static constexpr char kMark = 77;

  char* at(int64_t i) { return memory_.data() + kBorder + shift_ + i * sizeof(T); }

  int64_t count_;
  int shift_;
  std::vector<char> memory_;
};

template <typename T>
std::vector<void*> pointers(std::vector<Tensor<T>>& tensors) {
  std::vector<void*> all;
  for (Tensor<T>& tensor : tensors) all.push_back(tensor.data());
  return all;
}

inline ReduceOp op_of(const Call& call) {
  const bool is_bool = call.type == ElementType::kBool;
  switch (call.reduction) {
    case Reduction::kAvg:
      return ReduceOp::kAvg;
    case Reduction::kMax:
      return ReduceOp::kMax;
    case Reduction::kMin:
      return ReduceOp::kMin;
    default:
      return is_bool ? ReduceOp::kMax : ReduceOp::kSum;
  }
}

// Makes the call with tensors of T, and throws where a result is not what it must be. What rank r
// has in its part p is value(r, p, i).
template <typename T>
void verify_as(PeerGroup& group, const Call& call) {
  const int world = group.world(), rank = group.rank();
  const auto value = [&](int of_rank, int part, int64_t i) {
    T element = value_of<T>(call.seed * 1000 + of_rank * 100 + part, i);
    if constexpr (std::is_same_v<T, uint8_t>) {
      if (call.type == ElementType::kBool) element &= 1;
    }
    return element;
  };
  const auto own_value = [&](int part) { return [=](int64_t i) { return value(rank, part, i); }; };
  const auto reduced_value = [&](int part) {
    return [=](int64_t i) {
      return reduced<T>(op_of(call), world, [&](int peer) { return value(peer, part, i); });
    };
  };
  const std::vector<int64_t> counts = counts_of(call, world);
  const CallOptions options = {.sizes = call.sizes};
  const auto tensor = [&](int64_t count) { return Tensor<T>(count, call.shift); };
  const auto filled = [&](int64_t count, int part) {
    return Tensor<T>(count, call.shift, own_value(part));
  };

  switch (call.collective) {
    case Collective::kBarrier:
      return barrier(group, options);
    case Collective::kAllReduce:
    case Collective::kReduce: {
      Tensor<T> in = filled(call.count, 0), separate = tensor(call.count);
      Tensor<T>& out = call.in_place ? in : separate;
      if (call.collective == Collective::kAllReduce) {
        all_reduce(group, in.data(), out.data(), call.count, call.type, call.reduction, options);
      } else {
        reduce(group, in.data(), out.data(), call.count, call.type, call.reduction, call.root,
               options);
        if (rank != call.root) return in.expect(own_value(0), call, rank, 0);
      }
      out.expect(reduced_value(0), call, rank, 0);
      if (!call.in_place) in.expect(own_value(0), call, rank, 0);
      return;
    }
    case Collective::kReduceScatter: {
      std::vector<Tensor<T>> parts;
      for (int part = 0; part < world; ++part) parts.push_back(filled(counts[part], part));
      Tensor<T> separate = tensor(counts[rank]);
      Tensor<T>& out = call.in_place ? parts[rank] : separate;
      const std::vector<void*> in = pointers(parts);
      reduce_scatter(group, std::vector<const void*>(in.begin(), in.end()), out.data(), counts,
                     call.type, call.reduction, options);
      out.expect(reduced_value(rank), call, rank, rank);
      for (int part = 0; part < world; ++part) {
        if (call.in_place && part == rank) continue;
        parts[part].expect(own_value(part), call, rank, part);
      }
      return;
    }
    case Collective::kBroadcast: {
      Tensor<T> data = filled(call.count, 0);
      broadcast(group, data.data(), call.count, call.type, call.root, options);
      return data.expect([&](int64_t i) { return value(call.root, 0, i); }, call, rank, 0);
    }
    case Collective::kAllGather:
    case Collective::kGather: {
      Tensor<T> separate = filled(counts[rank], 0);
      std::vector<Tensor<T>> parts;
      for (int part = 0; part < world; ++part) {
        const bool is_own = call.in_place && part == rank;
        parts.push_back(is_own ? filled(counts[part], 0) : tensor(counts[part]));
      }
      Tensor<T>& own = call.in_place ? parts[rank] : separate;
      const std::vector<void*> out = pointers(parts);
      if (call.collective == Collective::kAllGather) {
        all_gather(group, own.data(), out, counts, call.type, options);
      } else {
        gather(group, own.data(), rank == call.root ? out : std::vector<void*>(), counts, call.type,
               call.root, options);
        if (rank != call.root) return own.expect(own_value(0), call, rank, 0);
      }
      for (int part = 0; part < world; ++part) {
        parts[part].expect([&](int64_t i) { return value(part, 0, i); }, call, rank, part);
      }
      return own.expect(own_value(0), call, rank, rank);
    }
    case Collective::kScatter: {
      std::vector<Tensor<T>> parts;
      for (int part = 0; part < world; ++part) parts.push_back(filled(counts[part], part));
      Tensor<T> out = tensor(counts[rank]);
      const std::vector<void*> in = pointers(parts);
      scatter(group,
              rank == call.root ? std::vector<const void*>(in.begin(), in.end())
                                : std::vector<const void*>(),
              out.data(), counts, call.type, call.root, options);
      return out.expect([&](int64_t i) { return value(call.root, rank, i); }, call, rank, 0);
    }
    case Collective::kAllToAll: {
      std::vector<Tensor<T>> sent, received;
      std::vector<int64_t> send_counts, receive_counts;
      for (int peer = 0; peer < world; ++peer) {
        send_counts.push_back(pair_count(call, rank, peer));
        receive_counts.push_back(pair_count(call, peer, rank));
        sent.push_back(filled(send_counts.back(), peer));
        received.push_back(tensor(receive_counts.back()));
      }
      const std::vector<void*> in = pointers(sent);
      all_to_all(group, std::vector<const void*>(in.begin(), in.end()), send_counts,
                 pointers(received), receive_counts, call.type, options);
      for (int peer = 0; peer < world; ++peer) {
        received[peer].expect([&](int64_t i) { return value(peer, rank, i); }, call, rank, peer);
        sent[peer].expect(own_value(peer), call, rank, peer);
      }
      return;
    }
    default:
      throw std::runtime_error("no such call");
  }
}

inline void verify(PeerGroup& group, const Call& call) {
  switch (call.type) {
    case ElementType::kFloat64:
      return verify_as<double>(group, call);
    case ElementType::kFloat32:
      return verify_as<float>(group, call);
    case ElementType::kBFloat16:
      return verify_as<BFloat16>(group, call);
    case ElementType::kFloat16:
      return verify_as<Float16>(group, call);
    case ElementType::kInt64:
      return verify_as<int64_t>(group, call);
    case ElementType::kInt32:
      return verify_as<int32_t>(group, call);
    case ElementType::kInt16:
      return verify_as<int16_t>(group, call);
    case ElementType::kInt8:
      return verify_as<int8_t>(group, call);
    default:
      return verify_as<uint8_t>(group, call);
  }
}

}  // namespace tpkernels::testing
