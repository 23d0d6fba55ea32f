// Fused GEMMs of few rows, on raw pointers: the weights are read once, at the speed of the cache or
// the memory they come from, and the activation is applied before a result is stored.
//
// Sums are fp32, for fp32, bf16 and fp16; a result is rounded once, when it is stored. A column of
// the output is one dot product per row, always summed in the same order: the bits of y do not
// depend on m, on how rows are blocked or on how columns are shared out to threads.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"

namespace tpkernels {

// y = act(x weight^T + bias)                                           gate null
// y = act(x gate^T + bias_gate) * (x weight^T + bias)                  gate given
//
// Strides are counted in elements; within a row elements are adjacent. Pointers need no alignment
// beyond the element's. Nothing that is written may overlap what is read.
struct DecodeGemm {
  const void* x;  // [m, k]
  int64_t x_stride;
  const void* weight;               // [n, k]
  const void* gate = nullptr;       // [n, k], or null
  int64_t weight_stride;            // of weight and gate
  const void* bias = nullptr;       // [n], or null
  const void* bias_gate = nullptr;  // [n], or null
  void* y;                          // [m, n], of type `out`
  void* pre = nullptr;              // [m, n], of type `out`, or null: x weight^T + bias
  void* pre_gate = nullptr;         // [m, n], of type `out`, or null: x gate^T + bias_gate
  int64_t y_stride;                 // of y, pre and pre_gate
  int64_t m;
  int64_t n;
  int64_t k;
  DType dtype;  // of x, the weights and the biases: all but fp64
  DType out;    // dtype, or kFloat32: sums that are not rounded
  Activation act = Activation::kNone;
};

// The loops compiled for one instruction set.
struct DecodeKernels {
  const char* isa;
  // Columns [n_begin, n_end) of y, pre and pre_gate. The caller shares columns out to threads in
  // any way; multiples of kDecodeColumns split best.
  void (*run)(const DecodeGemm&, int64_t n_begin, int64_t n_end);
};

// Columns that are summed into a buffer before the activation is applied to them.
inline constexpr int64_t kDecodeColumns = 96;

inline constexpr int kMaxDecodeIsas = 4;

// All that this processor can run, best first; null-terminated where there are fewer.
const DecodeKernels* const* decode_kernels_available();

// The best of them.
const DecodeKernels& decode_kernels();

}  // namespace tpkernels
