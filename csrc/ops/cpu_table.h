// Which of the CPU's ways serves a GEMM with a fused epilogue: one table, measured.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/activation.h"
#include "common/dtype.h"

namespace tpkernels {

enum class CpuWay {
  kDecode,   // kernels/gemm_decode_cpu.h: weights read once, everything in one pass
  kOneDnn,   // mkldnn::_linear_pointwise: oneDNN's GEMM with its own epilogue
  kLibrary,  // ATen's GEMM, then kernels/epilogue_cpu.h
};

// What the choice depends on.
struct CpuCall {
  DType dtype;
  Activation act;
  bool bias;
  int64_t m;
  int64_t n;
  int64_t k;
  bool contiguous;  // weights lie along k
  bool plain;       // gemm_act: no gate, and nothing but y is wanted
};

CpuWay cpu_way(const CpuCall& call);

// The most rows of x for which the decode kernels are the fastest way; 0: never.
int64_t decode_rows(DType dtype);

// Whether oneDNN's fused GEMM takes such a call at all.
bool onednn_serves(const CpuCall& call);

// The table for this processor, in words; `plain` as in CpuCall.
std::string cpu_table_summary(bool plain);

// For benches: "decode", "onednn" or "library" wherever it can serve, "auto" for the table again.
// False for another name. Not for use while other threads call the ops.
bool force_cpu_way(std::string_view name);

}  // namespace tpkernels
