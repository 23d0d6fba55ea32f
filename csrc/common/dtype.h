// Element types, and their conversions to the type the arithmetic is done in.
#pragma once

#include <bit>
#include <cstdint>

#include "common/inline.h"

namespace tpkernels {

enum class DType { kFloat64, kFloat32, kBFloat16, kFloat16 };

// Storage only: same bits as at::BFloat16 and at::Half.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

TPK_INLINE double widen(double x) { return x; }
TPK_INLINE float widen(float x) { return x; }

TPK_INLINE float widen(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// Integer form, so that loops vectorise without F16C.
TPK_INLINE float widen(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  const uint32_t normal = magnitude + ((127u - 15u) << 23);
  const uint32_t infinite = magnitude + ((255u - 31u) << 23);
  // Subnormal: the bits count units of 2^-24; put them under 2^-14's exponent and take 2^-14 off.
  const float subnormal =
      std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(113u << 23);
  const uint32_t exponent = magnitude & (31u << 23);
  uint32_t bits = exponent == (31u << 23) ? infinite : normal;
  bits = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : bits;
  return std::bit_cast<float>(bits | sign);
}

TPK_INLINE void narrow(double x, double& out) { out = x; }
TPK_INLINE void narrow(float x, float& out) { out = x; }

// Round to nearest, ties to even; NaN becomes the quiet NaN.
TPK_INLINE void narrow(float x, BFloat16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

TPK_INLINE void narrow(float x, Float16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14: adding 0.5 leaves the value in units of 2^-24 in the low mantissa bits, rounded.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                             std::bit_cast<uint32_t>(0.5f);
  const uint32_t normal =
      (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  // 65520 and above rounds to infinity (exponent 2^16 = 143).
  half = magnitude >= (143u << 23) ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  out.bits = static_cast<uint16_t>(half | sign);
}

}  // namespace tpkernels
