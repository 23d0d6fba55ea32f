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

// Both at once: what is not used is removed by the compiler. A NaN has a NaN value.
template <Activation A, typename C>
TPK_INLINE ValueAndSlope<C> activation(C x) {
  if constexpr (A == Activation::kNone) {
    return {x, C(1)};
  } else if constexpr (A == Activation::kGelu) {
    const Normal<C> n = normal(x);
    return {x * n.cdf, n.cdf + x * n.pdf};
  } else if constexpr (A == Activation::kGeluTanh) {
    // (1 + tanh(u)) / 2 is the logistic function of 2u. Beyond |x| = 32 its slope is 0: the bound
    // only keeps 0 * infinity away.
    const C square = x * x;
    const C bounded = square > C(1024) ? C(1024) : square;
    const Logistic<C> s = logistic(C(2) * kSqrt2OverPi<C> * x * (C(1) + kGeluCubic<C> * square));
    const C inner_slope = C(2) * kSqrt2OverPi<C> * (C(1) + C(3) * kGeluCubic<C> * bounded);
    return {x * s.value, s.value + x * s.value * s.complement * inner_slope};
  } else if constexpr (A == Activation::kSilu) {
    const Logistic<C> s = logistic(x);
    return {x * s.value, s.value * (C(1) + x * s.complement)};
  } else if constexpr (A == Activation::kRelu) {
    return {x < C(0) ? C(0) : x, x <= C(0) ? C(0) : C(1)};
  } else {
    static_assert(A == Activation::kRelu2);
    const C positive = x < C(0) ? C(0) : x;
    return {positive * positive, C(2) * positive};
  }
}

}  // namespace tpkernels
