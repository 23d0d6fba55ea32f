// Every reduction, type and instruction set that this processor runs, bit for bit against one
// element at a time; counts around the vectors, any alignment, out as one of the sources.
#include "kernels/reduce_cpu.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/reduce_reference.h"

namespace tpkernels {
namespace {

using testing::reduced;
using testing::value_of;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin};

template <typename T>
constexpr ReduceType type_of() {
  if constexpr (std::is_same_v<T, double>) return ReduceType::kFloat64;
  if constexpr (std::is_same_v<T, float>) return ReduceType::kFloat32;
  if constexpr (std::is_same_v<T, BFloat16>) return ReduceType::kBFloat16;
  if constexpr (std::is_same_v<T, Float16>) return ReduceType::kFloat16;
  if constexpr (std::is_same_v<T, int64_t>) return ReduceType::kInt64;
  if constexpr (std::is_same_v<T, int32_t>) return ReduceType::kInt32;
  if constexpr (std::is_same_v<T, int16_t>) return ReduceType::kInt16;
  if constexpr (std::is_same_v<T, int8_t>) return ReduceType::kInt8;
  return ReduceType::kUInt8;
}

template <typename Check>
void for_each_isa(Check check) {
  for (auto kernels = reduce_kernels_available(); *kernels; ++kernels) check(**kernels);
}

// `shift` bytes off every alignment. into: the source that out is, or -1.
template <typename T>
void check_case(const ReduceKernels& kernels, ReduceOp op, int world, int64_t count, int shift,
                int into) {
  std::vector<std::vector<char>> memory(world + 1);
  std::vector<const void*> sources(world);
  for (int rank = 0; rank <= world; ++rank) {
    memory[rank].assign(count * sizeof(T) + 2 * shift + 1, 77);
    for (int64_t i = 0; i < count && rank < world; ++i) {
      const T value = value_of<T>(rank, i);
      std::memcpy(memory[rank].data() + shift + i * sizeof(T), &value, sizeof value);
    }
    if (rank < world) sources[rank] = memory[rank].data() + shift;
  }
  std::vector<char>& target = memory[into < 0 ? world : into];
  kernels.function(type_of<T>(), op)(sources.data(), world, target.data() + shift, count);
  for (int64_t i = 0; i < count; ++i) {
    const T expected = reduced<T>(op, world, [&](int rank) { return value_of<T>(rank, i); });
    CHECK(std::memcmp(target.data() + shift + i * sizeof(T), &expected, sizeof expected) == 0,
          "%s, type %d, op %d, world %d, count %ld, into %d: element %ld", kernels.isa,
          static_cast<int>(type_of<T>()), static_cast<int>(op), world, static_cast<long>(count),
          into, static_cast<long>(i));
  }
  for (int guard = 0; guard <= shift; ++guard) {
    CHECK(target[target.size() - 1 - guard] == 77 && (guard == shift || target[guard] == 77),
          "%s, count %ld: written outside", kernels.isa, static_cast<long>(count));
  }
}

template <typename T>
void check_type() {
  for_each_isa([](const ReduceKernels& kernels) {
    for (const ReduceOp op : kOps) {
      for (const int world : {1, 2, 3, 4, 7}) {
        for (const int64_t count : {0, 1, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700}) {
          check_case<T>(kernels, op, world, count, count % 2 ? 3 : 0, -1);
        }
        for (int into = 0; into < world; ++into) check_case<T>(kernels, op, world, 333, 1, into);
      }
    }
  });
}

// Any NaN gives NaN, in any lane and of any rank; infinities are numbers.
template <typename T>
void check_special() {
  const float infinity = std::numeric_limits<float>::infinity();
  for_each_isa([&](const ReduceKernels& kernels) {
    for (const ReduceOp op : kOps) {
      for (const int world : {2, 3}) {
        constexpr int64_t kCount = 70;
        std::vector<std::vector<T>> values(world, std::vector<T>(kCount));
        std::vector<const void*> sources;
        for (int rank = 0; rank < world; ++rank) {
          for (int64_t i = 0; i < kCount; ++i) {
            const float special[] = {NAN, infinity, -infinity, 0.0f, 1.0f};
            const auto pick = special[testing::mixed(rank, i) % 5];
            const decltype(widen(T{})) wide = pick;
            narrow(wide, values[rank][i]);
          }
          sources.push_back(values[rank].data());
        }
        std::vector<T> out(kCount);
        kernels.function(type_of<T>(), op)(sources.data(), world, out.data(), kCount);
        for (int64_t i = 0; i < kCount; ++i) {
          const auto found = widen(out[i]);
          const auto expected =
              widen(reduced<T>(op, world, [&](int rank) { return values[rank][i]; }));
          CHECK(found == expected || (found != found && expected != expected),
                "%s, type %d, op %d, element %ld: %g, not %g", kernels.isa,
                static_cast<int>(type_of<T>()), static_cast<int>(op), static_cast<long>(i),
                static_cast<double>(found), static_cast<double>(expected));
        }
      }
    }
  });
}

// The bits of narrow(), of every pattern that `is_taken` takes added to some other one.
void check_bfloat16_bits(bool (*is_taken)(uint16_t)) {
  std::vector<BFloat16> a, b;
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
    if (is_taken(static_cast<uint16_t>(bits))) a.push_back({static_cast<uint16_t>(bits)});
  }
  for (size_t i = 0; i < a.size(); ++i) {
    // Mostly of like size, so that their sums are rounded.
    const uint64_t random = testing::mixed(1, static_cast<int64_t>(i));
    const auto near = static_cast<uint16_t>(a[i].bits ^ (random & 0x80ffu));
    b.push_back(random >> 32 & 1 && is_taken(near) ? BFloat16{near} : a[random % a.size()]);
  }
  for_each_isa([&](const ReduceKernels& kernels) {
    const void* const sources[] = {a.data(), b.data()};
    std::vector<BFloat16> out(a.size());
    kernels.function(ReduceType::kBFloat16, ReduceOp::kSum)(sources, 2, out.data(),
                                                            static_cast<int64_t>(out.size()));
    for (size_t i = 0; i < out.size(); ++i) {
      BFloat16 expected;
      narrow(widen(a[i]) + widen(b[i]), expected);
      CHECK(out[i].bits == expected.bits, "%s: %04x + %04x gave %04x, not %04x", kernels.isa,
            a[i].bits, b[i].bits, out[i].bits, expected.bits);
    }
  });
}

}  // namespace

TPK_TEST(reduce_float64) { check_type<double>(); }
TPK_TEST(reduce_float32) { check_type<float>(); }
TPK_TEST(reduce_bfloat16) { check_type<BFloat16>(); }
TPK_TEST(reduce_float16) { check_type<Float16>(); }
TPK_TEST(reduce_int64) { check_type<int64_t>(); }
TPK_TEST(reduce_int32) { check_type<int32_t>(); }
TPK_TEST(reduce_int16) { check_type<int16_t>(); }
TPK_TEST(reduce_int8) { check_type<int8_t>(); }
TPK_TEST(reduce_uint8) { check_type<uint8_t>(); }

TPK_TEST(reduce_propagates_nan_and_infinity) {
  check_special<double>();
  check_special<float>();
  check_special<BFloat16>();
  check_special<Float16>();
}

TPK_TEST(reduce_bfloat16_rounds_as_narrow) {
  check_bfloat16_bits([](uint16_t) { return true; });
  // Neither NaN nor a subnormal, nor what adds up to one: no block of them has an exception in it.
  check_bfloat16_bits([](uint16_t bits) {
    const int exponent = bits >> 7 & 0xff;
    return exponent > 16 && exponent < 0xff;
  });
}

}  // namespace tpkernels
