// The activations in long double, straight from their definitions.
#pragma once

#include <cmath>

#include "common/activation.h"

namespace tpkernels::testing {

struct Reference {
  long double value;
  long double slope;
};

inline Reference reference_activation(Activation act, long double x) {
  const long double pi = 3.14159265358979323846264338327950288L;
  switch (act) {
    case Activation::kNone:
      return {x, 1};
    case Activation::kGelu: {
      const long double cdf = std::erfc(-x / std::sqrt(2.0L)) / 2;
      return {x * cdf, cdf + x * std::exp(-x * x / 2) / std::sqrt(2 * pi)};
    }
    case Activation::kGeluTanh: {
      const long double u = std::sqrt(2 / pi) * (x + 0.044715L * x * x * x);
      const long double du = std::sqrt(2 / pi) * (1 + 3 * 0.044715L * x * x);
      const long double s = 1 / (1 + std::exp(-2 * u));
      return {x * s, s + x * 2 * du * s * (1 / (1 + std::exp(2 * u)))};
    }
    case Activation::kSilu: {
      const long double s = 1 / (1 + std::exp(-x));
      return {x * s, s + x * s * (1 / (1 + std::exp(x)))};
    }
    case Activation::kRelu:
      return {x > 0 ? x : 0, x > 0 ? 1.0L : 0.0L};
    case Activation::kRelu2:
      return {x > 0 ? x * x : 0, x > 0 ? 2 * x : 0.0L};
  }
  return {0, 0};
}

}  // namespace tpkernels::testing
