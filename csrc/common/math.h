// exp, the logistic function and the normal distribution, branch-free so that loops vectorise.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "common/inline.h"
#include "common/math_constants.h"

namespace tpkernels {

// How exact the functions are: to the rounding of the type that results are stored in. Half stands
// for bf16 and fp16; the arithmetic is fp32, the polynomials are shorter.
struct Half {};

template <typename P>
struct Precision;

template <>
struct Precision<float> {
  using Real = float;
  using Bits = uint32_t;
  static constexpr int kMantissaBits = 23;
  // 1.5 * 2^23 + exponent bias: adding it rounds to an integer n and leaves n + bias in the low
  // bits.
  static constexpr float kRound = 12582912.0f + 127.0f;
  static constexpr float kExpMin = -87.3365447f;   // ln of the smallest normal number
  static constexpr float kLn2High = 0.693359375f;  // Cody-Waite split of ln 2: 9 bits, and the rest
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr auto& kExpPoly = kExpPolyFloat;
  static constexpr auto& kNormalPoly = kNormalPolyFloat;
  static constexpr float kNormalShift = kNormalShiftFloat;
  static constexpr float kNormalBound = kNormalBoundFloat;
};

template <>
struct Precision<Half> : Precision<float> {
  static constexpr auto& kExpPoly = kExpPolyHalf;
  static constexpr auto& kNormalPoly = kNormalPolyHalf;
  static constexpr float kNormalShift = kNormalShiftHalf;
  static constexpr float kNormalBound = kNormalBoundHalf;
};

template <>
struct Precision<double> {
  using Real = double;
  using Bits = uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr double kRound = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52 + bias
  static constexpr double kExpMin = -708.3964185322641;
  static constexpr double kLn2High = 6.93145751953125e-1;
  static constexpr double kLn2Low = 1.42860682030941723212e-6;
  static constexpr auto& kExpPoly = kExpPolyDouble;
  static constexpr auto& kNormalPoly = kNormalPolyDouble;
  static constexpr double kNormalShift = kNormalShiftDouble;
  static constexpr double kNormalBound = kNormalBoundDouble;
};

template <typename P>
using Real = typename Precision<P>::Real;

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

// min(|x|, bound); NaN stays NaN.
template <typename P>
TPK_INLINE Real<P> bounded_magnitude(Real<P> x, Real<P> bound) {
  using K = Precision<P>;
  using C = Real<P>;
  constexpr typename K::Bits kSign = typename K::Bits{1} << (sizeof(C) * 8 - 1);
  const C magnitude = std::bit_cast<C>(std::bit_cast<typename K::Bits>(x) & ~kSign);
  return bound < magnitude ? bound : magnitude;
}

// exp(z) for -2^20 < z <= 0, to the rounding of P; 0 where the result is not a normal number. NaN
// gives NaN.
template <typename P>
TPK_INLINE Real<P> exp_nonpositive(Real<P> z) {
  using K = Precision<P>;
  using C = Real<P>;
  const C shifted = z * kLog2E<C> + K::kRound;
  const C n = shifted - K::kRound;
  const C r = (z - n * K::kLn2High) - n * K::kLn2Low;
  const auto scale_bits = std::bit_cast<typename K::Bits>(shifted) << K::kMantissaBits;
  const C value = horner(K::kExpPoly, r) * std::bit_cast<C>(scale_bits);
  return z < K::kExpMin ? C(0) : value;
}

// 1 / (1 + exp(m)) and 1 / (1 + exp(-m)) for 0 <= m < 2^20.
template <typename C>
struct Logistic {
  C lower;
  C upper;
};

template <typename P>
TPK_INLINE Logistic<Real<P>> logistic(Real<P> m) {
  using C = Real<P>;
  const C e = exp_nonpositive<P>(-m);
  const C upper = C(1) / (C(1) + e);
  return {e * upper, upper};
}

// Lower tail Phi(-a) and density of the standard normal for 0 <= a <= kNormalBound. The tail's
// relative error stays small, where 1 - erf(a / sqrt 2) would cancel; it is exact for a near 0.
template <typename C>
struct Normal {
  C tail;
  C density;
};

template <typename P>
TPK_INLINE Normal<Real<P>> normal(Real<P> a) {
  using K = Precision<P>;
  using C = Real<P>;
  const C e = exp_nonpositive<P>(C(-0.5) * a * a);
  const C s = a / (a + K::kNormalShift);
  return {e * horner(K::kNormalPoly, s), kInvSqrt2Pi<C> * e};
}

}  // namespace tpkernels
