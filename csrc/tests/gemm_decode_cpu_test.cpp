// GEMMs of few rows, by every instruction set that this processor runs, against double on the
// stored inputs: tails of K and N, any number of rows, strides, unaligned operands, both forms and
// all outputs; and that neither the split into columns nor the other rows change a bit.
#include "kernels/gemm_decode_cpu.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/reference.h"

namespace tpkernels {
namespace {

template <typename T>
constexpr DType kDType = DType::kFloat32;
template <>
constexpr DType kDType<BFloat16> = DType::kBFloat16;
template <>
constexpr DType kDType<Float16> = DType::kFloat16;

// Distance of 1 from the next number.
template <typename T>
constexpr double kEpsilon = 0x1p-23;
template <>
constexpr double kEpsilon<BFloat16> = 0x1p-7;
template <>
constexpr double kEpsilon<Float16> = 0x1p-10;

// A [rows, cols] whose rows are `stride` apart and begin one element into an allocation: no row is
// aligned to more than its element. Between the rows stand NaNs, which must not be read.
template <typename T>
struct Operand {
  int64_t stride;
  std::vector<T> values;

  Operand(int64_t rows, int64_t cols, int64_t stride, unsigned seed)
      : stride(stride), values(1 + rows * stride) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, 1);
    for (T& value : values) narrow(NAN, value);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) narrow(normal(generator), values[1 + i * stride + j]);
    }
  }

  const T* data() const { return values.data() + 1; }
  double at(int64_t i, int64_t j) const { return widen(values[1 + i * stride + j]); }
};

struct Sizes {
  int64_t m, n, k;
};

// Everything that a call reads, and what it should come to.
template <typename T>
struct Case {
  Sizes size;
  Operand<T> x, weight, gate, bias, bias_gate;

  explicit Case(Sizes s)
      : size(s),
        x(s.m, s.k, s.k + 3, 1),
        weight(s.n, s.k, s.k + 5, 2),
        gate(s.n, s.k, s.k + 5, 3),
        bias(1, s.n, s.n, 4),
        bias_gate(1, s.n, s.n, 5) {}

  DecodeGemm gemm(bool gated, bool biased, Activation act) const {
    DecodeGemm g{};
    g.x = x.data();
    g.x_stride = x.stride;
    g.weight = weight.data();
    g.weight_stride = weight.stride;
    g.gate = gated ? gate.data() : nullptr;
    g.bias = biased ? bias.data() : nullptr;
    g.bias_gate = biased && gated ? bias_gate.data() : nullptr;
    g.m = size.m;
    g.n = size.n;
    g.k = size.k;
    g.y_stride = size.n + 2;
    g.dtype = g.out = kDType<T>;
    g.act = act;
    return g;
  }

  // The sum, and the sum of its terms' magnitudes: errors are relative to that.
  void pre(const Operand<T>& w, const Operand<T>& b, bool biased, int64_t i, int64_t j, double* sum,
           double* scale) const {
    *sum = biased ? b.at(0, j) : 0;
    *scale = std::fabs(*sum);
    for (int64_t p = 0; p < size.k; ++p) {
      const double term = x.at(i, p) * w.at(j, p);
      *sum += term;
      *scale += std::fabs(term);
    }
  }
};

std::string name_of(const DecodeKernels& kernels, const DecodeGemm& g) {
  return std::string(kernels.isa) + " dtype " + std::to_string(static_cast<int>(g.dtype)) + " to " +
         std::to_string(static_cast<int>(g.out)) + " act " +
         std::to_string(static_cast<int>(g.act)) + (g.gate ? " gated" : "") + " m " +
         std::to_string(g.m) + " n " + std::to_string(g.n) + " k " + std::to_string(g.k);
}

template <typename Out>
void check_close(Out value, double truth, double scale, const std::string& what, int64_t i,
                 int64_t j) {
  // Half an epsilon for rounding to Out; the rest is fp32 sums of up to some hundred terms in many
  // lanes, and for 16-bit results the shorter polynomials of the activation.
  const double arithmetic = sizeof(Out) == 2 ? 0x1p-12 : 0x1p-20;
  const double bound =
      kEpsilon<Out> / 2 * std::fabs(truth) + arithmetic * (scale + std::fabs(truth)) + 0x1p-25;
  CHECK(std::fabs(widen(value) - truth) <= bound, "%s at %ld, %ld: %.9g, not %.9g", what.c_str(),
        static_cast<long>(i), static_cast<long>(j), static_cast<double>(widen(value)), truth);
}

template <typename T, typename Out = T>
void check_values(const DecodeKernels& kernels, Sizes size, bool gated, bool biased,
                  Activation act) {
  const Case<T> c(size);
  DecodeGemm g = c.gemm(gated, biased, act);
  g.out = kDType<Out>;
  // What is beyond a row must stay as it was.
  Out untouched;
  narrow(-7.0f, untouched);
  std::vector<Out> y(size.m * g.y_stride, untouched), pre = y, pre_gate = y;
  g.y = y.data();
  g.pre = pre.data();
  g.pre_gate = gated ? pre_gate.data() : nullptr;
  kernels.run(g, 0, size.n);
  const std::string what = name_of(kernels, g);
  const bool half_act = sizeof(T) == 2 && act != Activation::kNone;
  for (int64_t i = 0; i < size.m; ++i) {
    for (int64_t j = 0; j < size.n; ++j) {
      const int64_t at = i * g.y_stride + j;
      double up, up_scale, gate = 0, gate_scale = 0;
      c.pre(c.weight, c.bias, biased, i, j, &up, &up_scale);
      check_close(pre[at], up, up_scale, what + " pre", i, j);
      double truth = testing::reference_activation(act, up).value, scale = up_scale;
      if (gated) {
        c.pre(c.gate, c.bias_gate, biased, i, j, &gate, &gate_scale);
        check_close(pre_gate[at], gate, gate_scale, what + " pre_gate", i, j);
        const double activated = testing::reference_activation(act, gate).value;
        truth = activated * up;
        scale = gate_scale * std::fabs(up) * 2 + up_scale * std::fabs(activated);
      } else if (act == Activation::kRelu2) {
        scale *= 2 * std::fabs(up);
      } else {
        scale *= 2;  // no activation is steeper than that
      }
      // fp32 results of half types still have the shorter polynomials.
      if (half_act && sizeof(Out) == 4) scale = scale * 0x1p8;
      check_close(y[at], truth, scale, what, i, j);
    }
    for (int64_t j = size.n; j < g.y_stride; ++j) {
      const int64_t at = i * g.y_stride + j;
      CHECK(widen(y[at]) == -7 && widen(pre[at]) == -7, "%s: written beyond row %ld", what.c_str(),
            static_cast<long>(i));
    }
  }
}

template <typename Check>
void for_each_isa(Check check) {
  for (auto kernels = decode_kernels_available(); *kernels; ++kernels) check(**kernels);
}

template <typename T>
void check_sizes() {
  for_each_isa([](const DecodeKernels& kernels) {
    for (const int64_t m : {1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33}) {
      check_values<T>(kernels, {m, 21, 70}, false, true, Activation::kGelu);
    }
    for (int64_t k : {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65}) {
      for (const int64_t m : {1, 5}) {
        check_values<T>(kernels, {m, 9, k}, false, true, Activation::kNone);
      }
    }
    for (const int64_t n : {1, 3, 4, 5, 7, 8, 9, 95, 96, 97, 203}) {
      check_values<T>(kernels, {1, n, 40}, false, true, Activation::kSilu);
      check_values<T>(kernels, {6, n, 40}, true, true, Activation::kSilu);
    }
    for (const Activation act : kActivations) {
      check_values<T>(kernels, {3, 18, 33}, false, false, act);
      check_values<T>(kernels, {3, 18, 33}, true, false, act);
      check_values<T>(kernels, {3, 18, 33}, true, true, act);
      check_values<T, float>(kernels, {3, 18, 33}, false, true, act);
    }
  });
}

template <typename T>
void check_bits() {
  for_each_isa([](const DecodeKernels& kernels) {
    const Sizes size{34, 203, 77};
    const Case<T> c(size);
    for (const bool gated : {false, true}) {
      DecodeGemm g = c.gemm(gated, true, Activation::kGelu);
      const std::string what = name_of(kernels, g);
      std::vector<T> whole(size.m * g.y_stride), split = whole, alone = whole;
      const size_t bytes = sizeof(T) * whole.size();
      g.y = whole.data();
      kernels.run(g, 0, size.n);
      // From the last columns to the first, parts of 1, 2, 4 ... columns.
      g.y = split.data();
      for (int64_t end = size.n, part = 1; end > 0; end -= part, part = 2 * part) {
        kernels.run(g, end > part ? end - part : 0, end);
      }
      CHECK(std::memcmp(whole.data(), split.data(), bytes) == 0, "%s: split by columns",
            what.c_str());
      for (int64_t i = 0, rows = 1; i < size.m; i += rows, rows = rows % 5 + 1) {
        DecodeGemm part = g;
        part.m = size.m - i < rows ? size.m - i : rows;
        part.x = c.x.data() + i * c.x.stride;
        part.y = alone.data() + i * g.y_stride;
        kernels.run(part, 0, size.n);
      }
      CHECK(std::memcmp(whole.data(), alone.data(), bytes) == 0, "%s: split by rows", what.c_str());
    }
  });
}

}  // namespace

TPK_TEST(decode_gemm_float32) { check_sizes<float>(); }
TPK_TEST(decode_gemm_bfloat16) { check_sizes<BFloat16>(); }
TPK_TEST(decode_gemm_float16) { check_sizes<Float16>(); }
TPK_TEST(decode_gemm_bits) {
  check_bits<float>();
  check_bits<BFloat16>();
  check_bits<Float16>();
}

// Integers are exact in every dtype, whatever the order; here also more rows than the buffers hold.
TPK_TEST(decode_gemm_integers) {
  for_each_isa([](const DecodeKernels& kernels) {
    const int64_t m = 70, n = 100, k = 100;
    std::vector<float> x(m * k), weight(n * k), y(m * n);
    for (int64_t i = 0; i < m * k; ++i) x[i] = static_cast<float>(i * 7 % 5 - 2);
    for (int64_t i = 0; i < n * k; ++i) weight[i] = static_cast<float>(i * 11 % 7 - 3);
    DecodeGemm g{};
    g.x = x.data();
    g.weight = weight.data();
    g.x_stride = g.weight_stride = g.k = k;
    g.y = y.data();
    g.y_stride = g.n = n;
    g.m = m;
    g.dtype = g.out = DType::kFloat32;
    kernels.run(g, 0, n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float truth = 0;
        for (int64_t p = 0; p < k; ++p) truth += x[i * k + p] * weight[j * k + p];
        CHECK(y[i * n + j] == truth, "%s at %ld, %ld: %g, not %g", kernels.isa,
              static_cast<long>(i), static_cast<long>(j), static_cast<double>(y[i * n + j]),
              static_cast<double>(truth));
      }
    }
  });
}

// A NaN or infinity in a row of x or of the weight reaches that row or column and nothing else.
TPK_TEST(decode_gemm_not_finite) {
  for_each_isa([](const DecodeKernels& kernels) {
    const int64_t m = 5, n = 20, k = 35;
    std::vector<float> x(m * k, 1), weight(n * k, 0.5f), y(m * n);
    x[2 * k + 34] = NAN;
    weight[7 * k + 3] = INFINITY;
    DecodeGemm g{};
    g.x = x.data();
    g.weight = weight.data();
    g.x_stride = g.weight_stride = g.k = k;
    g.y = y.data();
    g.y_stride = g.n = n;
    g.m = m;
    g.dtype = g.out = DType::kFloat32;
    g.act = Activation::kGelu;
    kernels.run(g, 0, n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const float value = y[i * n + j];
        const bool right = i == 2   ? std::isnan(value)
                           : j == 7 ? std::isinf(value)
                                    : std::fabs(value - 17.5f) < 1e-4f;
        CHECK(right, "%s at %ld, %ld: %g", kernels.isa, static_cast<long>(i), static_cast<long>(j),
              static_cast<double>(value));
      }
    }
  });
}

}  // namespace tpkernels
