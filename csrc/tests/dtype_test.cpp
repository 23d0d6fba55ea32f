// Every 16-bit pattern, and the roundings that go wrong in such code: ties, subnormals, overflow.
#include "common/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>

#include "tests/check.h"

namespace tpkernels {
namespace {

// The value of a binary float with `exponent_bits`, from its definition.
double decode(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  const int leading = exponent == 0 ? 0 : 1 << mantissa_bits;
  return sign * std::ldexp(leading + mantissa, (exponent ? exponent : 1) - bias - mantissa_bits);
}

template <typename T>
void check_round_trip(int exponent_bits) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const T in{static_cast<uint16_t>(bits)};
    const float value = widen(in);
    const double expected = decode(in.bits, exponent_bits);
    T out;
    narrow(value, out);
    if (std::isnan(expected)) {
      CHECK(std::isnan(value) && std::isnan(widen(out)), "bits %04x", bits);
    } else {
      CHECK(static_cast<double>(value) == expected, "bits %04x: %g, not %g", bits,
            static_cast<double>(value), expected);
      CHECK(out.bits == in.bits, "bits %04x came back as %04x", bits, out.bits);
    }
  }
}

// Between two neighbours: their middle goes to the even one, next to the middle to the nearer.
template <typename T>
void check_rounding(int exponent_bits) {
  const uint16_t infinity =
      static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  for (uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    const uint16_t above = bits + 1;
    const float middle =
        static_cast<float>((decode(bits, exponent_bits) + decode(above, exponent_bits)) / 2);
    const float inputs[] = {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, INFINITY)};
    const uint16_t expected[] = {bits, bits % 2 ? above : bits, above};
    for (int i = 0; i < 3; ++i) {
      for (const float sign : {1.0f, -1.0f}) {
        T out;
        narrow(sign * inputs[i], out);
        const uint16_t want = expected[i] | (sign < 0 ? 0x8000 : 0);
        CHECK(out.bits == want, "%a: %04x, not %04x", static_cast<double>(sign * inputs[i]),
              out.bits, want);
      }
    }
  }
}

}  // namespace

TPK_TEST(bfloat16_round_trip) { check_round_trip<BFloat16>(8); }
TPK_TEST(float16_round_trip) { check_round_trip<Float16>(5); }
TPK_TEST(bfloat16_rounding) { check_rounding<BFloat16>(8); }
TPK_TEST(float16_rounding) { check_rounding<Float16>(5); }

TPK_TEST(overflow) {
  Float16 half;
  narrow(65519.996f, half);
  CHECK(half.bits == 0x7bff, "65519.996: %04x", half.bits);
  narrow(65520.0f, half);
  CHECK(half.bits == 0x7c00, "65520: %04x", half.bits);
  narrow(-1e30f, half);
  CHECK(half.bits == 0xfc00, "-1e30: %04x", half.bits);
  BFloat16 brain;
  narrow(std::bit_cast<float>(0x7f7fffffu), brain);
  CHECK(brain.bits == 0x7f80, "largest float: %04x", brain.bits);
}

}  // namespace tpkernels
