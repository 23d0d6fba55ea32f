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
  CHECK(exp_nonpositive(C(-1000000)) == 0, "exp far below the smallest number is not 0");
  CHECK(std::isnan(exp_nonpositive(std::numeric_limits<C>::quiet_NaN())), "exp(NaN) is a number");
}

template <typename C>
void check_logistic() {
  long double worst = 0;
  for (int i = 0; i <= 100000; ++i) {
    const C m = C(80) * i / 100000;
    const long double exact = m;
    const Logistic<C> s = logistic(m);
    worst = std::fmax(worst, relative_error(s.lower, 1 / (1 + std::exp(exact))));
    worst = std::fmax(worst, relative_error(s.upper, 1 / (1 + std::exp(-exact))));
  }
  CHECK(worst < 3, "logistic: off by %.2Lf epsilon", worst);
}

template <typename C>
void check_normal() {
  long double worst_tail = 0, worst_density = 0;
  for (int i = 0; i <= 100000; ++i) {
    const C a = C(12) * i / 100000;
    const long double exact = a, pi = 3.14159265358979323846264338327950288L;
    const long double tail = std::erfc(exact / std::sqrt(2.0L)) / 2;
    const long double density = std::exp(-exact * exact / 2) / std::sqrt(2 * pi);
    // The rounding of a^2 alone costs a^2 / 4 epsilon.
    const long double scale = 1 + exact * exact / 4;
    worst_tail = std::fmax(worst_tail, relative_error(normal(a).tail, tail) / scale);
    worst_density = std::fmax(worst_density, relative_error(normal(a).density, density) / scale);
  }
  CHECK(worst_tail < 3, "normal tail: off by %.2Lf epsilon", worst_tail);
  CHECK(worst_density < 3, "normal density: off by %.2Lf epsilon", worst_density);
  CHECK(normal(C(0)).tail == C(0.5), "Phi(0) is not 1/2");
  CHECK(normal(MathConstants<C>::kNormalBound).tail == 0, "the tail at its bound is not 0");
}

}  // namespace

TPK_TEST(exp_float) { check_exp<float>(); }
TPK_TEST(exp_double) { check_exp<double>(); }
TPK_TEST(logistic_float) { check_logistic<float>(); }
TPK_TEST(logistic_double) { check_logistic<double>(); }
TPK_TEST(normal_float) { check_normal<float>(); }
TPK_TEST(normal_double) { check_normal<double>(); }

}  // namespace tpkernels
