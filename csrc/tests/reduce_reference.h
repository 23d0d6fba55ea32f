// What a reduction over ranks must give, written out for one element; and values to reduce.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "kernels/reduce_cpu.h"

namespace tpkernels::testing {

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

// 64 bits that look random, of two numbers (splitmix64, https://prng.di.unimi.it/splitmix64.c).
inline uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xd1b54a32d192ed03u + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Floating: between -2 and 2, with all the digits of the type. Integers: any bits.
template <typename T>
T value_of(uint64_t seed, int64_t i) {
  const uint64_t bits = mixed(seed, static_cast<uint64_t>(i));
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    const double x = static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-62;
    T value;
    if constexpr (std::is_same_v<T, double>) {
      value = x;
    } else {
      narrow(static_cast<float>(x), value);
    }
    return value;
  }
}

// value(rank) for each of `world` ranks, in their order.
template <typename T, typename Value>
T reduced(ReduceOp op, int world, Value&& value) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    T total = value(0);
    for (int rank = 1; rank < world; ++rank) {
      const T next = value(rank);
      if (op == ReduceOp::kMax) {
        total = next > total ? next : total;
      } else if (op == ReduceOp::kMin) {
        total = next < total ? next : total;
      } else {
        total = static_cast<T>(static_cast<U>(static_cast<U>(total) + static_cast<U>(next)));
      }
    }
    return op == ReduceOp::kAvg ? static_cast<T>(total / static_cast<int64_t>(world)) : total;
  } else {
    auto total = widen(value(0));
    for (int rank = 1; rank < world; ++rank) {
      const auto next = widen(value(rank));
      const bool nan = total != total || next != next;
      if (op == ReduceOp::kMax) {
        total = nan ? total + next : (next > total ? next : total);
      } else if (op == ReduceOp::kMin) {
        total = nan ? total + next : (next < total ? next : total);
      } else {
        total += next;
      }
    }
    if (op == ReduceOp::kAvg) total /= static_cast<decltype(total)>(world);
    T result;
    narrow(total, result);
    return result;
  }
}

}  // namespace tpkernels::testing
