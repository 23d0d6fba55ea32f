// Element-wise halves of the fused GEMMs, on raw pointers: what happens to a GEMM's result while it
// is still in cache. Arithmetic is fp64 for fp64 and fp32 for fp32, bf16 and fp16; a result is
// rounded once, when it is stored.
//
// A matrix is rows x cols, each row contiguous, rows adjacent. It is worked on in units: unit u is
// block (u % blocks_of(cols)) of row (u / blocks_of(cols)). The caller shares units
// [0, rows * blocks_of(cols)) out to threads in any way: each unit is written by one call only, so
// the result does not depend on the split.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"

namespace tpkernels {

// Columns of a unit: a few buffers of this many fp64 stay in a first-level cache.
inline constexpr int64_t kEpilogueBlock = 512;

inline constexpr int64_t blocks_of(int64_t cols) {
  return (cols + kEpilogueBlock - 1) / kEpilogueBlock;
}

// y = act(h + bias); pre = h + bias. h may be y or pre. bias [cols] and pre may be null.
struct BiasAct {
  const void* h;
  const void* bias;
  void* pre;
  void* y;
  int64_t cols;
  DType dtype;
  Activation act;
};

// dx = dy * act'(pre). dx may be dy.
struct ActGrad {
  const void* dy;
  const void* pre;
  void* dx;
  int64_t cols;
  DType dtype;
  Activation act;
};

// gate = g + bias_gate; up = u + bias_up; y = act(gate) * up. g and u may be y, gate or up.
// bias_gate, bias_up [cols], gate and up may be null.
struct BiasGlu {
  const void* g;
  const void* u;
  const void* bias_gate;
  const void* bias_up;
  void* gate;
  void* up;
  void* y;
  int64_t cols;
  DType dtype;
  Activation act;
};

// d_gate = dy * up * act'(gate); d_up = dy * act(gate). d_gate or d_up may be dy.
struct GluGrad {
  const void* dy;
  const void* gate;
  const void* up;
  void* d_gate;
  void* d_up;
  int64_t cols;
  DType dtype;
  Activation act;
};

// The loops compiled for one instruction set.
struct EpilogueKernels {
  const char* isa;
  void (*bias_act)(const BiasAct&, int64_t unit_begin, int64_t unit_end);
  void (*act_grad)(const ActGrad&, int64_t unit_begin, int64_t unit_end);
  void (*bias_glu)(const BiasGlu&, int64_t unit_begin, int64_t unit_end);
  void (*glu_grad)(const GluGrad&, int64_t unit_begin, int64_t unit_end);
};

inline constexpr int kMaxEpilogueIsas = 3;

// All that this processor can run, best first; null-terminated where there are fewer.
const EpilogueKernels* const* epilogue_kernels_available();

// The best of them.
const EpilogueKernels& epilogue_kernels();

}  // namespace tpkernels
