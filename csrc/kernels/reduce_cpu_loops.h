// The loops of reduce_cpu.h, compiled once per instruction set by the reduce_cpu_*.cpp files.
//
// Written with the compiler's vectors, of the size of a register: a result stays in registers over
// all sources, and out may be a source, where a vectorised loop would have to prove that it is not.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "common/dtype.h"
#include "kernels/reduce_cpu.h"

namespace tpkernels {
namespace {  // a copy for each instruction set

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename Element, int kCount>
struct VectorOf {
  typedef Element type __attribute__((vector_size(kCount * sizeof(Element))));
};
template <typename Element, int kCount>
using Vector = typename VectorOf<Element, kCount>::type;

// Computed in what it is stored in.
template <typename Element>
struct Plain {
  using Stored = Element;
  using Computed = Element;
  static constexpr int kLanes = kVectorBytes / sizeof(Element);
  using V = Vector<Element, kLanes>;

  static V load(const char* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(V v, char* to) { std::memcpy(to, &v, sizeof v); }
};

template <typename Element>
struct Halves;  // 16 bits stored, fp32 computed

// What two neighbours hold, apart: a bf16 is the upper half of an fp32, so that pairs of them widen
// and narrow within their lanes.
template <typename V>
struct EvenOdd {
  V even, odd;

  [[gnu::always_inline]] friend EvenOdd operator/(EvenOdd sum, float divisor) {
    return {sum.even / divisor, sum.odd / divisor};
  }
};

template <>
struct Halves<BFloat16> {
  using Stored = BFloat16;
  using Computed = float;
  static constexpr int kLanes = kVectorBytes / sizeof(BFloat16);
  using Floats = Vector<float, kLanes / 2>;
  using Bits = Vector<uint32_t, kLanes / 2>;
  using V = EvenOdd<Floats>;

  static V load(const char* from) {
    Bits bits;
    std::memcpy(&bits, from, sizeof bits);
    return {reinterpret_cast<Floats>(bits << 16), reinterpret_cast<Floats>(bits & 0xffff0000u)};
  }

  static void store(V v, char* to) {
    Bits bits = narrowed(v);
    std::memcpy(to, &bits, sizeof bits);
  }

 private:
  static_assert(std::endian::native == std::endian::little);

#if defined(__AVX512BF16__)
  // The instruction takes subnormals for 0 and keeps what a NaN carries: those few the long way.
  [[gnu::always_inline]] static Bits narrowed(V v) {
    constexpr int kNaN = 0x01 | 0x80, kSubnormal = 0x20;
    const __m512 even = reinterpret_cast<__m512>(v.even), odd = reinterpret_cast<__m512>(v.odd);
    if (_mm512_fpclass_ps_mask(even, kNaN | kSubnormal) |
        _mm512_fpclass_ps_mask(odd, kNaN | kSubnormal)) [[unlikely]] {
      return narrowed_in_integers(v);
    }
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);  // all even ones, then all odd
    return reinterpret_cast<Bits>(_mm512_maskz_permutexvar_epi16(~0u, interleaving(), halves));
  }
  static __m512i interleaving() {
    Vector<uint16_t, kLanes> from{};
    for (int lane = 0; lane < kLanes; ++lane) from[lane] = (lane & 1) * kLanes / 2 + lane / 2;
    return reinterpret_cast<__m512i>(from);
  }
#else
  static Bits narrowed(V v) { return narrowed_in_integers(v); }
#endif

  [[gnu::always_inline]] static Bits narrowed_in_integers(V v) {
    return rounded(v.even) >> 16 | (rounded(v.odd) & 0xffff0000u);
  }
  // As narrow(float, BFloat16&), the result in the upper half.
  [[gnu::always_inline]] static Bits rounded(Floats x) {
    const Bits bits = reinterpret_cast<Bits>(x);
    return x != x ? Bits{} + 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

template <>
struct Halves<Float16> {
  using Stored = Float16;
  using Computed = float;
  static constexpr int kLanes = kVectorBytes / sizeof(float);
  using V = Vector<float, kLanes>;

#if defined(__AVX512F__)
  // With a mask of all lanes, as gcc 12 warns of its own header's unmasked forms.
  static V load(const char* from) {
    return reinterpret_cast<V>(
        _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  static void store(V v, char* to) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to),
        _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static V load(const char* from) {
    return reinterpret_cast<V>(
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static void store(V v, char* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static V load(const char* from) {
    Float16 halves[kLanes];
    std::memcpy(halves, from, sizeof halves);
    V v;
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = widen(halves[lane]);
    return v;
  }
  static void store(V v, char* to) {
    Float16 halves[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) narrow(v[lane], halves[lane]);
    std::memcpy(to, halves, sizeof halves);
  }
#endif
};

struct Sum {
  template <typename V>
  [[gnu::always_inline]] static V join(V a, V b) {
    return a + b;
  }
};
struct Max {
  // A NaN in either wins: in b as a > NaN is false, in a as NaN != NaN.
  template <typename V>
  [[gnu::always_inline]] static V join(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};
struct Min {
  template <typename V>
  [[gnu::always_inline]] static V join(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

template <typename Join, typename V>
[[gnu::always_inline]] inline V join(V a, V b) {
  return Join::join(a, b);
}
template <typename Join, typename V>
[[gnu::always_inline]] inline EvenOdd<V> join(EvenOdd<V> a, EvenOdd<V> b) {
  return {Join::join(a.even, b.even), Join::join(a.odd, b.odd)};
}

// What a sum is divided by, lane by lane: integers as `Signed`, towards zero.
template <typename Format, typename Signed>
[[gnu::always_inline]] inline typename Format::V quotient(typename Format::V sum, int world) {
  if constexpr (std::is_floating_point_v<typename Format::Computed>) {
    return sum / static_cast<typename Format::Computed>(world);
  } else {
    for (int lane = 0; lane < Format::kLanes; ++lane) {
      const int64_t signed_sum = static_cast<Signed>(sum[lane]);
      sum[lane] = static_cast<typename Format::Computed>(signed_sum / world);
    }
    return sum;
  }
}

// kFixedWorld: the number of sources where it is known to the compiler, else 0.
template <typename Format, typename Join, typename Average, int kFixedWorld>
void reduce_fixed(const void* const* sources, int world_or_fixed, void* out, int64_t count) {
  using V = typename Format::V;
  constexpr int kUnroll = 4;
  constexpr int64_t kStep = sizeof(typename Format::Stored) * Format::kLanes;
  const int world = kFixedWorld ? kFixedWorld : world_or_fixed;
  const auto source = [&](int rank) { return static_cast<const char*>(sources[rank]); };
  char* const target = static_cast<char*>(out);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(typename Format::Stored));

  int64_t at = 0;
  for (; at + kUnroll * kStep <= bytes; at += kUnroll * kStep) {
    V sum[kUnroll];
    for (int u = 0; u < kUnroll; ++u) sum[u] = Format::load(source(0) + at + u * kStep);
    for (int rank = 1; rank < world; ++rank) {
      const char* const from = source(rank) + at;
      for (int u = 0; u < kUnroll; ++u) sum[u] = join<Join>(sum[u], Format::load(from + u * kStep));
    }
    for (int u = 0; u < kUnroll; ++u) {
      if constexpr (!std::is_void_v<Average>) sum[u] = quotient<Format, Average>(sum[u], world);
      Format::store(sum[u], target + at + u * kStep);
    }
  }
  for (; at < bytes; at += kStep) {
    // The last ones go through a whole vector.
    const size_t part = static_cast<size_t>(bytes - at < kStep ? bytes - at : kStep);
    char padded[kStep] = {};
    std::memcpy(padded, source(0) + at, part);
    V sum = Format::load(padded);
    for (int rank = 1; rank < world; ++rank) {
      std::memcpy(padded, source(rank) + at, part);
      sum = join<Join>(sum, Format::load(padded));
    }
    if constexpr (!std::is_void_v<Average>) sum = quotient<Format, Average>(sum, world);
    Format::store(sum, padded);
    std::memcpy(target + at, padded, part);
  }
}

template <typename Format, typename Join, typename Average = void>
void reduce(const void* const* sources, int world, void* out, int64_t count) {
  if (world == 2) return reduce_fixed<Format, Join, Average, 2>(sources, world, out, count);
  return reduce_fixed<Format, Join, Average, 0>(sources, world, out, count);
}

// Floating: sums, quotients and comparisons in one format.
template <typename Format>
inline constexpr ReduceFunction kFloating[kReduceOps] = {
    &reduce<Format, Sum>, &reduce<Format, Sum, typename Format::Computed>, &reduce<Format, Max>,
    &reduce<Format, Min>};

// Integers: sums without a sign, as they may wrap.
template <typename Element>
inline constexpr ReduceFunction kInteger[kReduceOps] = {
    &reduce<Plain<std::make_unsigned_t<Element>>, Sum>,
    &reduce<Plain<std::make_unsigned_t<Element>>, Sum, Element>, &reduce<Plain<Element>, Max>,
    &reduce<Plain<Element>, Min>};

constexpr ReduceKernels make_reduce_kernels(const char* isa) {
  ReduceKernels kernels{isa, {}};
  const ReduceFunction* const by_type[kReduceTypes] = {
      kFloating<Plain<double>>,   kFloating<Plain<float>>, kFloating<Halves<BFloat16>>,
      kFloating<Halves<Float16>>, kInteger<int64_t>,       kInteger<int32_t>,
      kInteger<int16_t>,          kInteger<int8_t>,        kInteger<uint8_t>};
  for (int type = 0; type < kReduceTypes; ++type) {
    for (int op = 0; op < kReduceOps; ++op) kernels.functions[type][op] = by_type[type][op];
  }
  return kernels;
}

}  // namespace
}  // namespace tpkernels
