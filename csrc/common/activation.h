// The activations of the fused epilogues and their derivatives.
#pragma once

#include <string_view>

#include "common/inline.h"
#include "common/math.h"

namespace tpkernels {

enum class Activation { kNone, kGelu, kGeluTanh, kSilu, kRelu, kRelu2 };

inline constexpr Activation kActivations[] = {Activation::kNone,     Activation::kGelu,
                                              Activation::kGeluTanh, Activation::kSilu,
                                              Activation::kRelu,     Activation::kRelu2};
inline constexpr std::string_view kActivationNames[] = {"none", "gelu", "gelu_tanh",
                                                        "silu", "relu", "relu2"};

// act(x) and act'(x).
template <typename C>
struct ValueAndSlope {
  C value;
  C slope;
};

// gelu, gelu_tanh and silu are x * g(x) with g(x) + g(-x) = 1. So with m = |x| and q = g(-m),
// act(x) = max(x, 0) - m * q, and act'(x) = d where x < 0 and 1 - d elsewhere, with d = act'(-m):
// no cancellation below 0, and large m, infinity too, may be bounded where q is 0.
template <typename C>
TPK_INLINE ValueAndSlope<C> from_lower_half(C x, C m, C q, C d) {
  const C positive = C(0) > x ? C(0) : x;
  return {positive - m * q, x < C(0) ? d : C(1) - d};
}

// Both at once: what is not used is removed by the compiler. A NaN has a NaN value.
template <Activation A, typename P>
TPK_INLINE ValueAndSlope<Real<P>> activation(Real<P> x) {
  using C = Real<P>;
  if constexpr (A == Activation::kNone) {
    return {x, C(1)};
  } else if constexpr (A == Activation::kGelu) {
    const C m = bounded_magnitude<P>(x, Precision<P>::kNormalBound);
    const Normal<C> n = normal<P>(m);
    return from_lower_half(x, m, n.tail, n.tail - m * n.density);
  } else if constexpr (A == Activation::kGeluTanh) {
    // (1 + tanh(u)) / 2 is the logistic function of 2u; at m = 32, exp(2u) is past either range.
    const C m = bounded_magnitude<P>(x, C(32));
    const C square = m * m;
    const Logistic<C> s = logistic<P>(C(2) * kSqrt2OverPi<C> * m * (C(1) + kGeluCubic<C> * square));
    const C slope_2u = C(2) * kSqrt2OverPi<C> * (C(1) + C(3) * kGeluCubic<C> * square);
    return from_lower_half(x, m, s.lower, s.lower * (C(1) - m * s.upper * slope_2u));
  } else if constexpr (A == Activation::kSilu) {
    const C m = bounded_magnitude<P>(x, C(1024));
    const Logistic<C> s = logistic<P>(m);
    return from_lower_half(x, m, s.lower, s.lower * (C(1) - m * s.upper));
  } else if constexpr (A == Activation::kRelu) {
    return {C(0) > x ? C(0) : x, x <= C(0) ? C(0) : C(1)};
  } else {
    static_assert(A == Activation::kRelu2);
    const C positive = C(0) > x ? C(0) : x;
    return {positive * positive, C(2) * positive};
  }
}

}  // namespace tpkernels
