// Reductions over ranks, on raw pointers of any alignment: out[i] = sources[0][i] with
// sources[1][i] with ... in this order, whatever the instruction set.
//
// fp64 and fp32 accumulate in themselves, bf16 and fp16 in fp32 and round once. Integer sums wrap.
// kAvg is the sum divided by the number of sources; of integers as NCCL does it, the quotient
// towards zero of the sum that has wrapped. kMax and kMin propagate NaN, as torch.maximum does.
// Booleans are kUInt8 of 0 and 1: "or" is kMax, "and" is kMin.
#pragma once

#include <cstdint>

namespace tpkernels {

enum class ReduceType {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8
};
inline constexpr int kReduceTypes = 9;

enum class ReduceOp { kSum, kAvg, kMax, kMin };
inline constexpr int kReduceOps = 4;

// `sources`: `world` >= 1 pointers. out [count] may be one of the sources, and must not overlap
// them otherwise.
using ReduceFunction = void (*)(const void* const* sources, int world, void* out, int64_t count);

// The loops compiled for one instruction set.
struct ReduceKernels {
  const char* isa;
  ReduceFunction functions[kReduceTypes][kReduceOps];

  ReduceFunction function(ReduceType type, ReduceOp op) const {
    return functions[static_cast<int>(type)][static_cast<int>(op)];
  }
};

inline constexpr int kMaxReduceIsas = 4;

// All that this processor can run, best first; null-terminated where there are fewer.
const ReduceKernels* const* reduce_kernels_available();

// The best of them.
const ReduceKernels& reduce_kernels();

}  // namespace tpkernels
