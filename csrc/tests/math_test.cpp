// exp, logistic and normal against long double, in units of the type's rounding.
#include "common/math.h"

#include <cmath>
#include <limits>

#include "tests/check.h"

namespace tpkernels {
namespace {

template <typename C>
long double relative_error(C value, long double truth) {
  return std::fabs(static_cast<long double>(value) - truth) / std::fabs(truth) /
         std::numeric_limits<C>::epsilon();
}

template <typename C>
void check_exp() {
  long double worst = 0;
  const C lowest = MathConstants<C>::kExpMin;
  for (int i = 0; i <= 200000; ++i) {
    const C z = lowest * i / 200000;
    worst =
        std::fmax(worst, relative_error(exp_nonpositive(z), std::exp(static_cast<long double>(z))));
  }
  CHECK(worst < 2, "exp: off by %.2Lf epsilon", worst);
  CHECK(exp_nonpositive(C(0)) == 1, "exp(0) = %g", static_cast<double>(exp_nonpositive(C(0))));
  CHECK(exp_nonpositive(lowest * 2) == 0, "exp far below the smallest number is not 0");
  CHECK(exp_nonpositive(-std::numeric_limits<C>::infinity()) == 0, "exp(-infinity) is not 0");
  CHECK(std::isnan(exp_nonpositive(std::numeric_limits<C>::quiet_NaN())), "exp(NaN) is a number");
}

template <typename C>
void check_logistic() {
  long double worst = 0;
  for (int i = -100000; i <= 100000; ++i) {
    const C x = C(80) * i / 100000;
    const long double truth = 1 / (1 + std::exp(-static_cast<long double>(x)));
    const long double complement = 1 / (1 + std::exp(static_cast<long double>(x)));
    const Logistic<C> s = logistic(x);
    worst = std::fmax(worst, relative_error(s.value, truth));
    worst = std::fmax(worst, relative_error(s.complement, complement));
  }
  CHECK(worst < 3, "logistic: off by %.2Lf epsilon", worst);
}

template <typename C>
void check_normal() {
  long double worst_absolute = 0, worst_tail = 0;
  for (int i = -100000; i <= 100000; ++i) {
    const C x = C(12) * i / 100000;
    const long double exact = x;
    const long double truth = std::erfc(-exact / std::sqrt(2.0L)) / 2;
    const C cdf = normal(x).cdf;
    const long double error = std::fabs(cdf - truth) / std::numeric_limits<C>::epsilon();
    worst_absolute = std::fmax(worst_absolute, error);
    // The rounding of x^2 alone costs x^2 / 4 epsilon in the tail.
    worst_tail = std::fmax(worst_tail, relative_error(cdf, truth) / (1 + exact * exact / 4));
  }
  CHECK(worst_absolute < 1.5, "normal: off by %.2Lf epsilon", worst_absolute);
  CHECK(worst_tail < 5, "normal: tail off by %.2Lf epsilon", worst_tail);
  CHECK(normal(C(0)).cdf == C(0.5), "Phi(0) is not 1/2");
  CHECK(normal(std::numeric_limits<C>::infinity()).cdf == 1, "Phi(infinity) is not 1");
  CHECK(normal(-std::numeric_limits<C>::infinity()).cdf == 0, "Phi(-infinity) is not 0");
}

}  // namespace

TPK_TEST(exp_float) { check_exp<float>(); }
TPK_TEST(exp_double) { check_exp<double>(); }
TPK_TEST(logistic_float) { check_logistic<float>(); }
TPK_TEST(logistic_double) { check_logistic<double>(); }
TPK_TEST(normal_float) { check_normal<float>(); }
TPK_TEST(normal_double) { check_normal<double>(); }

}  // namespace tpkernels
