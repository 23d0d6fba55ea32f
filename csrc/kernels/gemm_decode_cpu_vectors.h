// Vectors of the instruction set that a file is compiled for: what the loops of
// gemm_decode_cpu_loops.h load, multiply and sum.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/dtype.h"

namespace tpkernels {
namespace {  // a copy for each instruction set

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr bool kManyRegisters = true;  // 32 vectors, else 16
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr bool kManyRegisters = false;
#else
inline constexpr int kVectorBytes = 16;
#if defined(__aarch64__)
inline constexpr bool kManyRegisters = true;
#else
inline constexpr bool kManyRegisters = false;
#endif
#endif

inline constexpr int kLanes = kVectorBytes / 4;

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));

template <typename Vector>
TPK_INLINE Vector load_bytes(const void* source) {
  Vector v;
  __builtin_memcpy(&v, source, sizeof(v));
  return v;
}

template <int... I>
TPK_INLINE Floats shuffle(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Words{I...});
#endif
}

// A step of transposed sums: where a and b hold in each `kBlock` lanes terms of one sum, the result
// holds in each half a block terms of a's sum, then of b's. Low half + high half always, so that
// the order of a sum does not depend on its place.
template <int kBlock, int... I>
TPK_INLINE Floats fold(Floats a, Floats b, std::integer_sequence<int, I...>) {
  constexpr int kHalf = kBlock / 2;
  const Floats low = shuffle<(I / kHalf % 2 * kLanes + I / kBlock * kBlock + I % kHalf)...>(a, b);
  const Floats high =
      shuffle<(I / kHalf % 2 * kLanes + I / kBlock * kBlock + I % kHalf + kHalf)...>(a, b);
  return low + high;
}

// The sums over v[0], v[kStride] ... of kCount vectors, kCount a power of 2 up to kLanes: each in
// kBlock lanes still to be added, repeated where there are fewer sums than blocks.
template <int kCount, int kStride, int kBlock>
TPK_INLINE Floats partial_sums(const Floats* v) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  if constexpr (kBlock == kLanes) {
    static_assert(kCount == 1);
    return v[0];
  } else if constexpr (kCount * kBlock < kLanes) {
    const Floats sums = partial_sums<kCount, kStride, kBlock * 2>(v);
    return fold<kBlock * 2>(sums, sums, Lanes{});
  } else {
    const Floats even = partial_sums<kCount / 2, kStride * 2, kBlock * 2>(v);
    const Floats odd = partial_sums<kCount / 2, kStride * 2, kBlock * 2>(v + kStride);
    return fold<kBlock * 2>(even, odd, Lanes{});
  }
}

template <int kStep, int... I>
TPK_INLINE Floats every(Floats v, std::integer_sequence<int, I...>) {
  return shuffle<(I * kStep % kLanes)...>(v, v);
}

// out[i] = the sum over v[i]'s lanes.
template <int kCount>
TPK_INLINE void store_sums(const Floats* v, float* out) {
  if constexpr (kCount > kLanes) {
    store_sums<kLanes>(v, out);
    store_sums<kCount - kLanes>(v + kLanes, out + kLanes);
  } else {
    constexpr int kPadded = int{std::bit_ceil(unsigned{kCount})};
    Floats padded[kPadded];
    for (int i = 0; i < kPadded; ++i) padded[i] = v[i < kCount ? i : kCount - 1];
    const Floats spread = partial_sums<kPadded, 1, 1>(padded);
    const Floats sums = every<kLanes / kPadded>(spread, std::make_integer_sequence<int, kLanes>{});
    __builtin_memcpy(out, &sums, sizeof(float) * kCount);
  }
}

// How elements of type T are loaded, kStep at a time, and multiplied: dot(sum, a, b) adds a * b to
// sum, products of neighbours in one lane where a lane holds several.
template <typename T>
struct Operand;

// The first `count` of kStep elements, the rest zero.
template <typename T>
TPK_INLINE auto load_first(const T* source, int64_t count) {
  T padded[Operand<T>::kStep] = {};
  __builtin_memcpy(padded, source, sizeof(T) * count);
  return Operand<T>::load(padded);
}

template <>
struct Operand<float> {
  using Vector = Floats;
  static constexpr int kStep = kLanes;
  TPK_INLINE Vector load(const float* source) { return load_bytes<Floats>(source); }
#if defined(__AVX512F__)
  TPK_INLINE Vector load_tail(const float* source, int64_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), source);
  }
#else
  TPK_INLINE Vector load_tail(const float* source, int64_t count) {
    return load_first(source, count);
  }
#endif
  TPK_INLINE void dot(Floats& sum, Vector a, Vector b) { sum += a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Operand<BFloat16> {
  using Vector = __m512bh;
  static constexpr int kStep = 2 * kLanes;
  TPK_INLINE Vector load(const BFloat16* source) { return load_bytes<__m512bh>(source); }
  TPK_INLINE Vector load_tail(const BFloat16* source, int64_t count) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, source);
  }
  TPK_INLINE void dot(Floats& sum, Vector a, Vector b) { sum = _mm512_dpbf16_ps(sum, a, b); }
};
#else
template <>
struct Operand<BFloat16> {
  // Of each pair of neighbours in a word: the element at the lower address, and the other one.
  struct Vector {
    Floats low;
    Floats high;
  };
  static constexpr int kStep = 2 * kLanes;
  TPK_INLINE Vector from_words(Words words) {
    static_assert(std::endian::native == std::endian::little);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
  }
  TPK_INLINE Vector load(const BFloat16* source) { return from_words(load_bytes<Words>(source)); }
#if defined(__AVX512F__)
  TPK_INLINE Vector load_tail(const BFloat16* source, int64_t count) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return from_words((Words)_mm512_maskz_loadu_epi16(mask, source));
  }
#else
  TPK_INLINE Vector load_tail(const BFloat16* source, int64_t count) {
    return load_first(source, count);
  }
#endif
  TPK_INLINE void dot(Floats& sum, Vector a, Vector b) {
    sum += a.low * b.low;
    sum += a.high * b.high;
  }
};
#endif

template <>
struct Operand<Float16> {
  using Vector = Floats;
  static constexpr int kStep = kLanes;
#if defined(__AVX512F__)
  TPK_INLINE Vector load(const Float16* source) {
    // Not _mm512_cvtph_ps, which GCC's own header lets -Wall complain of.
    return _mm512_maskz_cvtph_ps(0xffff, load_bytes<__m256i>(source));
  }
#elif defined(__F16C__)
  TPK_INLINE Vector load(const Float16* source) {
    return _mm256_cvtph_ps(load_bytes<__m128i>(source));
  }
#else
  TPK_INLINE Vector load(const Float16* source) {
    Vector v;
    for (int i = 0; i < kLanes; ++i) v[i] = widen(source[i]);
    return v;
  }
#endif
#if defined(__AVX512F__)
  TPK_INLINE Vector load_tail(const Float16* source, int64_t count) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_maskz_loadu_epi16(mask, source));
  }
#else
  TPK_INLINE Vector load_tail(const Float16* source, int64_t count) {
    return load_first(source, count);
  }
#endif
  TPK_INLINE void dot(Floats& sum, Vector a, Vector b) { sum += a * b; }
};

}  // namespace
}  // namespace tpkernels
