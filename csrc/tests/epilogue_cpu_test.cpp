// Every epilogue, activation, dtype and instruction set that this processor runs, against long
// double on the stored inputs; widths around the block and vector sizes; the split into units.
#include "kernels/epilogue_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/reference.h"

namespace tpkernels {
namespace {

using testing::Reference;
using testing::reference_activation;

template <typename T>
struct Dtype;
template <>
struct Dtype<double> {
  static constexpr DType kValue = DType::kFloat64;
  static constexpr double kEpsilon = 0x1p-52;
};
template <>
struct Dtype<float> {
  static constexpr DType kValue = DType::kFloat32;
  static constexpr double kEpsilon = 0x1p-23;
};
template <>
struct Dtype<BFloat16> {
  static constexpr DType kValue = DType::kBFloat16;
  static constexpr double kEpsilon = 0x1p-7;
};
template <>
struct Dtype<Float16> {
  static constexpr DType kValue = DType::kFloat16;
  static constexpr double kEpsilon = 0x1p-10;
};

template <typename T>
std::vector<T> random(int64_t size, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<T> values(size);
  for (T& value : values) {
    const decltype(widen(value)) wide = normal(generator);
    narrow(wide, value);
  }
  return values;
}

// Rounding to T costs half an epsilon; the rest is the arithmetic before it, for 16-bit types a
// part of an epsilon. The scale is that of the terms, not of the result: gelu' is a difference near
// its zero.
template <typename T>
void check_close(T value, long double truth, long double scale, const char* what, int64_t i) {
  const bool is_half = sizeof(T) == 2;
  const long double epsilon = Dtype<T>::kEpsilon;
  const long double arithmetic = is_half ? 0x1p-10L / 8 : 8 * epsilon;
  const long double bound = epsilon / 2 * std::fabs(truth) +
                            arithmetic * (std::fabs(truth) + scale) +
                            (is_half ? 0x1p-25L : 0);  // half of fp16's smallest number
  CHECK(std::fabs(static_cast<long double>(widen(value)) - truth) <= bound,
        "%s, element %ld: %.9g, not %.9Lg", what, static_cast<long>(i),
        static_cast<double>(widen(value)), truth);
}

template <typename T>
void check_all(const EpilogueKernels& kernels, Activation act, int64_t rows, int64_t cols) {
  const int64_t size = rows * cols, units = rows * blocks_of(cols);
  const DType dtype = Dtype<T>::kValue;
  const std::string what =
      std::string(kernels.isa) + " " + std::string(kActivationNames[static_cast<int>(act)]) +
      " dtype " + std::to_string(static_cast<int>(dtype)) + " cols " + std::to_string(cols);
  const auto name = [&what](const char* output) { return what + " " + output; };
  const auto a = random<T>(size, 1), b = random<T>(size, 2), c = random<T>(size, 3);
  const auto bias_a = random<T>(cols, 4), bias_b = random<T>(cols, 5);
  std::vector<T> out(size), out2(size), out3(size);

  kernels.bias_act({a.data(), bias_a.data(), out2.data(), out.data(), cols, dtype, act}, 0, units);
  for (int64_t i = 0; i < size; ++i) {
    // The sum in the compute type is what is activated.
    const long double pre = widen(a[i]) + widen(bias_a[i % cols]);
    check_close(out2[i], pre, 0, name("pre").c_str(), i);
    check_close(out[i], reference_activation(act, pre).value, std::fabs(pre), name("y").c_str(), i);
  }

  kernels.act_grad({a.data(), b.data(), out.data(), cols, dtype, act}, 0, units);
  for (int64_t i = 0; i < size; ++i) {
    const long double dy = widen(a[i]), pre = widen(b[i]);
    check_close(out[i], dy * reference_activation(act, pre).slope,
                std::fabs(dy) * (1 + std::fabs(pre)), name("dx").c_str(), i);
  }

  kernels.bias_glu({a.data(), b.data(), bias_a.data(), bias_b.data(), out2.data(), out3.data(),
                    out.data(), cols, dtype, act},
                   0, units);
  for (int64_t i = 0; i < size; ++i) {
    const long double gate = widen(a[i]) + widen(bias_a[i % cols]);
    const long double up = widen(b[i]) + widen(bias_b[i % cols]);
    check_close(out2[i], gate, 0, name("gate").c_str(), i);
    check_close(out3[i], up, 0, name("up").c_str(), i);
    check_close(out[i], reference_activation(act, gate).value * up, std::fabs(gate * up),
                name("glu y").c_str(), i);
  }

  kernels.glu_grad({a.data(), b.data(), c.data(), out.data(), out2.data(), cols, dtype, act}, 0,
                   units);
  for (int64_t i = 0; i < size; ++i) {
    const long double dy = widen(a[i]), gate = widen(b[i]), up = widen(c[i]);
    const Reference r = reference_activation(act, gate);
    check_close(out[i], dy * up * r.slope, std::fabs(dy * up) * (1 + std::fabs(gate)),
                name("d_gate").c_str(), i);
    check_close(out2[i], dy * r.value, std::fabs(dy * gate), name("d_up").c_str(), i);
  }
}

template <typename Check>
void for_each_case(Check check) {
  for (auto kernels = epilogue_kernels_available(); *kernels; ++kernels) {
    for (const Activation act : kActivations) check(**kernels, act);
  }
}

template <typename T>
void check_widths() {
  for_each_case([](const EpilogueKernels& kernels, Activation act) {
    for (const int64_t cols : {1, 15, 17, 511, 513, 1030}) check_all<T>(kernels, act, 3, cols);
  });
}

}  // namespace

TPK_TEST(epilogues_float64) { check_widths<double>(); }
TPK_TEST(epilogues_float32) { check_widths<float>(); }
TPK_TEST(epilogues_bfloat16) { check_widths<BFloat16>(); }
TPK_TEST(epilogues_float16) { check_widths<Float16>(); }

// In place, without bias, and cut into units in any way: the same bits.
TPK_TEST(in_place_and_split) {
  for_each_case([](const EpilogueKernels& kernels, Activation act) {
    const int64_t rows = 3, cols = 1030, units = rows * blocks_of(cols);
    const auto a = random<float>(rows * cols, 1);
    std::vector<float> whole(rows * cols), split = a;
    const BiasAct out_of_place{a.data(), nullptr,         nullptr, whole.data(),
                               cols,     DType::kFloat32, act};
    const BiasAct in_place{split.data(), nullptr,         nullptr, split.data(),
                           cols,         DType::kFloat32, act};
    kernels.bias_act(out_of_place, 0, units);
    for (int64_t u = units - 1; u >= 0; --u) kernels.bias_act(in_place, u, u + 1);
    CHECK(std::memcmp(whole.data(), split.data(), sizeof(float) * whole.size()) == 0, "%s act %d",
          kernels.isa, static_cast<int>(act));
  });
}

// A NaN stays where it is and goes nowhere else; infinities and huge numbers go to their limits.
TPK_TEST(not_finite) {
  for_each_case([](const EpilogueKernels& kernels, Activation act) {
    std::vector<float> in(40, 0.5f), y(40), slope(40), ones(40, 1.0f);
    in[7] = NAN;
    in[20] = INFINITY;
    in[21] = -INFINITY;
    in[22] = -1e30f;
    kernels.bias_act({in.data(), nullptr, nullptr, y.data(), 40, DType::kFloat32, act}, 0, 1);
    kernels.act_grad({ones.data(), in.data(), slope.data(), 40, DType::kFloat32, act}, 0, 1);
    const auto check = [&](int i, float value, float expected, const char* what) {
      CHECK(value == expected, "%s act %d element %d: %s is %g, not %g", kernels.isa,
            static_cast<int>(act), i, what, static_cast<double>(value),
            static_cast<double>(expected));
    };
    for (int i = 0; i < 40; ++i) {
      CHECK(std::isnan(y[i]) == (i == 7), "%s act %d element %d: %g", kernels.isa,
            static_cast<int>(act), i, static_cast<double>(y[i]));
    }
    check(20, y[20], INFINITY, "act(infinity)");
    if (act == Activation::kNone) return;
    check(20, slope[20], act == Activation::kRelu2 ? INFINITY : 1.0f, "act'(infinity)");
    for (const int i : {21, 22}) {
      check(i, y[i], 0.0f, "act below");
      check(i, slope[i], 0.0f, "act' below");
    }
  });
}

}  // namespace tpkernels
