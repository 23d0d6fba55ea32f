// exp, the logistic function and the normal distribution, branch-free so that loops vectorise.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "common/inline.h"
#include "common/math_constants.h"

namespace tpkernels {

template <typename C>
struct MathConstants;

template <>
struct MathConstants<float> {
  using Bits = uint32_t;
  static constexpr int kMantissaBits = 23;
  // 1.5 * 2^23 + exponent bias: adding it rounds to an integer n and leaves n + bias in the low
  // bits.
  static constexpr float kRound = 12582912.0f + 127.0f;
  static constexpr float kExpMin = -87.3365447f;   // ln of the smallest normal number
  static constexpr float kLn2High = 0.693359375f;  // Cody-Waite split of ln 2: 9 bits, and the rest
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr auto& kExpPoly = kExpPolyF;
  static constexpr auto& kMillsPoly = kMillsPolyF;
  static constexpr float kMillsShift = kMillsShiftF;
};

template <>
struct MathConstants<double> {
  using Bits = uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr double kRound = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52 + bias
  static constexpr double kExpMin = -708.3964185322641;
  static constexpr double kLn2High = 6.93145751953125e-1;
  static constexpr double kLn2Low = 1.42860682030941723212e-6;
  static constexpr auto& kExpPoly = kExpPolyD;
  static constexpr auto& kMillsPoly = kMillsPolyD;
  static constexpr double kMillsShift = kMillsShiftD;
};

template <typename C>
inline constexpr C kLog2E = C(1.4426950408889634074);
template <typename C>
inline constexpr C kSqrt2OverPi = C(0.79788456080286535588);  // tanh GELU, arXiv:1606.08415
template <typename C>
inline constexpr C kGeluCubic = C(0.044715);  // tanh GELU, arXiv:1606.08415
template <typename C>
inline constexpr C kInvSqrt2Pi = C(0.39894228040143267794);  // density of the normal at 0

template <typename C, int N, int... I>
TPK_INLINE C horner(const C (&coefficients)[N], C t, std::integer_sequence<int, I...>) {
  C y = coefficients[0];
  ((y = y * t + coefficients[I + 1]), ...);
  return y;
}

// Value of a polynomial, highest power first; unrolled, which the vectoriser needs.
template <typename C, int N>
TPK_INLINE C horner(const C (&coefficients)[N], C t) {
  return horner(coefficients, t, std::make_integer_sequence<int, N - 1>{});
}

template <typename C>
TPK_INLINE C magnitude_of(C x) {
  return x < C(0) ? -x : x;
}

// exp(z) for z <= 0, within 2 units in the last place; 0 where the result is not a normal number.
// NaN gives NaN.
template <typename C>
TPK_INLINE C exp_nonpositive(C z) {
  using K = MathConstants<C>;
  const C clamped = z < K::kExpMin ? K::kExpMin : z;
  const C shifted = clamped * kLog2E<C> + K::kRound;
  const C n = shifted - K::kRound;
  const C r = (clamped - n * K::kLn2High) - n * K::kLn2Low;
  const auto scale_bits = std::bit_cast<typename K::Bits>(shifted) << K::kMantissaBits;
  const C value = horner(K::kExpPoly, r) * std::bit_cast<C>(scale_bits);
  return z < K::kExpMin ? C(0) : value;
}

// 1 / (1 + exp(-x)), and its complement without cancellation.
template <typename C>
struct Logistic {
  C value;
  C complement;
};

template <typename C>
TPK_INLINE Logistic<C> logistic(C x) {
  const C e = exp_nonpositive(-magnitude_of(x));
  const C near = C(1) / (C(1) + e);
  const C far = e * near;
  return x < C(0) ? Logistic<C>{far, near} : Logistic<C>{near, far};
}

// Distribution function and density of the standard normal: Phi(x) = (1 + erf(x / sqrt 2)) / 2.
// Small relative error also in the lower tail, where 1 + erf cancels.
template <typename C>
struct Normal {
  C cdf;
  C pdf;
};

template <typename C>
TPK_INLINE Normal<C> normal(C x) {
  using K = MathConstants<C>;
  const C magnitude = magnitude_of(x);
  // The tail is 0 from 38.5 on (13.2 for fp32): the bound only keeps infinity * 0 away.
  const C a = magnitude > C(64) ? C(64) : magnitude;
  const C e = exp_nonpositive(C(-0.5) * a * a);
  const C r = C(1) / (a + K::kMillsShift);
  const C s = a * r;
  // k / (a + k) = 1 - s: the product is Phi(-a).
  const C tail = e * (K::kMillsShift * r) * horner(K::kMillsPoly, s);
  return {x < C(0) ? tail : C(1) - tail, kInvSqrt2Pi<C> * e};
}

}  // namespace tpkernels
