// exp, logistic and normal against long double, in units of the type's rounding.
#include "common/math.h"

#include <cmath>
#include <limits>

#include "tests/check.h"

namespace tpkernels {
namespace {

template <typename P>
constexpr Real<P> kEpsilon = std::numeric_limits<P>::epsilon();
template <>
constexpr float kEpsilon<Half> = 0x1p-10f;

// Worst error allowed, in rounding units; for Half a small part of one.
template <typename P>
constexpr long double kBound = 3;
template <>
constexpr long double kBound<Half> = 0.0625;

// In rounding units of P: fp16's, 2^-10, for Half.
template <typename P>
long double relative_error(Real<P> value, long double truth) {
  return std::fabs(static_cast<long double>(value) - truth) / std::fabs(truth) / kEpsilon<P>;
}

template <typename P>
void check_exp() {
  using C = Real<P>;
  long double worst = 0;
  const C lowest = Precision<P>::kExpMin;
  for (int i = 0; i <= 200000; ++i) {
    const C z = lowest * i / 200000;
    worst = std::fmax(
        worst, relative_error<P>(exp_nonpositive<P>(z), std::exp(static_cast<long double>(z))));
  }
  CHECK(worst < kBound<P>, "exp: off by %.2Lf epsilon", worst);
  CHECK(exp_nonpositive<P>(C(0)) == 1, "exp(0) = %g",
        static_cast<double>(exp_nonpositive<P>(C(0))));
  CHECK(exp_nonpositive<P>(C(-1000000)) == 0, "exp far below the smallest number is not 0");
  CHECK(std::isnan(exp_nonpositive<P>(std::numeric_limits<C>::quiet_NaN())),
        "exp(NaN) is a number");
}

template <typename P>
void check_logistic() {
  using C = Real<P>;
  long double worst = 0;
  for (int i = 0; i <= 100000; ++i) {
    const C m = C(80) * i / 100000;
    const long double exact = m;
    const Logistic<C> s = logistic<P>(m);
    worst = std::fmax(worst, relative_error<P>(s.lower, 1 / (1 + std::exp(exact))));
    worst = std::fmax(worst, relative_error<P>(s.upper, 1 / (1 + std::exp(-exact))));
  }
  CHECK(worst < kBound<P>, "logistic: off by %.2Lf epsilon", worst);
}

template <typename P>
void check_normal() {
  using C = Real<P>;
  long double worst_tail = 0, worst_density = 0;
  for (int i = 0; i <= 100000; ++i) {
    const C a = C(12) * i / 100000;
    const long double exact = a, pi = 3.14159265358979323846264338327950288L;
    const long double tail = std::erfc(exact / std::sqrt(2.0L)) / 2;
    const long double density = std::exp(-exact * exact / 2) / std::sqrt(2 * pi);
    // The rounding of a^2 alone costs a^2 / 4 epsilon.
    const long double scale = 1 + exact * exact / 4;
    worst_tail = std::fmax(worst_tail, relative_error<P>(normal<P>(a).tail, tail) / scale);
    worst_density =
        std::fmax(worst_density, relative_error<P>(normal<P>(a).density, density) / scale);
  }
  CHECK(worst_tail < kBound<P>, "normal tail: off by %.2Lf epsilon", worst_tail);
  CHECK(worst_density < kBound<P>, "normal density: off by %.2Lf epsilon", worst_density);
  const C half = normal<P>(C(0)).tail;
  CHECK(std::fabs(half - C(0.5)) <= kEpsilon<P> / 64, "Phi(0) = %.9g", static_cast<double>(half));
  CHECK(normal<P>(Precision<P>::kNormalBound).tail == 0, "the tail at its bound is not 0");
}

}  // namespace

TPK_TEST(exp_float) { check_exp<float>(); }
TPK_TEST(exp_double) { check_exp<double>(); }
TPK_TEST(exp_half) { check_exp<Half>(); }
TPK_TEST(logistic_float) { check_logistic<float>(); }
TPK_TEST(logistic_double) { check_logistic<double>(); }
TPK_TEST(logistic_half) { check_logistic<Half>(); }
TPK_TEST(normal_float) { check_normal<float>(); }
TPK_TEST(normal_double) { check_normal<double>(); }
TPK_TEST(normal_half) { check_normal<Half>(); }

}  // namespace tpkernels
