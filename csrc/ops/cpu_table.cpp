#include "ops/cpu_table.h"

#include <optional>
#include <string>

#include "kernels/gemm_decode_cpu.h"

namespace tpkernels {
namespace {

// The rows of x up to which each way serves, by the best instruction set of kernels/gemm_decode_cpu
// that runs here; above, the library. Measured by bench/bench_cpu_table.py on 2026-11-30, AMD EPYC
// (Zen 4: 2 cores, 32 MB of shared cache), torch 2.13.0, one thread, (N, K) of (1536, 768), (768,
// 1536), (4096, 1024), (1024, 4096). Other processes ran beside it, so that single ratios are good
// to some 20 %; a limit is the largest M at which the way was not slower, or that was tried.
//
// Times of the library's way over the decode kernels' (the span over the shapes), warm:
//
//          bf16         fp32         fp16
//   M 1    2.4 to 2.8   1.2 to 1.8   2.0 to 2.4
//   M 16   1.2 to 1.9   1.4 to 3.7   4 to 13
//   M 32   1.0 to 2.2   1.1 to 2.2   4 to 12
//   M 64   0.9 to 1.6   0.9 to 1.8   4 to 11
//   M 128  0.6 to 1.0   1.1 to 1.7   4 to 8
//
// Without AVX-512 BF16, the decode kernels built for less against eager under ONEDNN_MAX_CPU_ISA
// (not interleaved): avx512 bf16 1.5 to 8 to M 64; avx2 bf16 1.7 to 13 to M 64, fp32 1.0 to 4 to M
// 16 and 0.5 to 0.9 at M 32; baseline bf16 1.1 to 3.9 to M 16 and about 1.2 above, fp32 1.1 to 3.2
// at M 1 and 0.8 at M 4. Their fp16 was not measured: ASSUMPTION: as bf16, ATen's being the same
// loops everywhere. baseline's fp16 is widened without vectors and stays off.
//
// oneDNN's fused epilogue: fp32 1.1 to 1.4 times faster than the library from M 65 to 512, which
// there is MKL's GEMM, and up to twice as fast as the decode kernels at M 128 (on AMD; on other
// makes not measured, so not taken); its error was 1.1 to 1.9 times eager's there, and up to 4.2
// times at K 1025 to 4096 with N 128, so longer sums than kOneDnnMostSummed are not given to it.
// bf16: 0.9 to 1.05, which is noise: it does not pay.
struct Limits {
  int64_t float32;
  int64_t bfloat16;
  int64_t float16;
};

struct Row {
  std::string_view isa;
  Limits decode;
  int64_t onednn_float32;  // on AMD
};

constexpr Row kTable[] = {
    {"avx512bf16", {64, 64, 128}, 512},
    {"avx512", {64, 64, 128}, 512},
    {"avx2", {16, 64, 64}, 0},
    {"baseline", {1, 16, 0}, 0},
};
constexpr Row kNotMeasured = {"", {0, 0, 0}, 0};
constexpr int64_t kOneDnnMostSummed = 768;  // K, for the error's sake

Row find_row() {
#if defined(__x86_64__)
  for (Row row : kTable) {
    if (row.isa != decode_kernels().isa) continue;
    if (!__builtin_cpu_is("amd")) row.onednn_float32 = 0;
    return row;
  }
#endif
  return kNotMeasured;
}

const Row& table_row() {
  static const Row row = find_row();
  return row;
}

std::optional<CpuWay> forced;

bool decode_serves(const CpuCall& call) { return call.contiguous && call.dtype != DType::kFloat64; }

}  // namespace

int64_t decode_rows(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return table_row().decode.float32;
    case DType::kBFloat16:
      return table_row().decode.bfloat16;
    case DType::kFloat16:
      return table_row().decode.float16;
    case DType::kFloat64:
      break;
  }
  return 0;
}

bool onednn_serves(const CpuCall& call) {
  return call.plain && call.contiguous && call.m > 0 && call.n > 0 && call.k > 0 &&
         (call.dtype == DType::kFloat32 || call.dtype == DType::kBFloat16) &&
         call.act != Activation::kRelu2;
}

CpuWay cpu_way(const CpuCall& call) {
  if (forced) {
    if (*forced == CpuWay::kDecode && decode_serves(call)) return CpuWay::kDecode;
    if (*forced == CpuWay::kOneDnn && onednn_serves(call)) return CpuWay::kOneDnn;
    return CpuWay::kLibrary;
  }
  if (decode_serves(call) && call.m <= decode_rows(call.dtype)) return CpuWay::kDecode;
  if (onednn_serves(call) && call.dtype == DType::kFloat32 && call.k <= kOneDnnMostSummed &&
      call.m <= table_row().onednn_float32) {
    return CpuWay::kOneDnn;
  }
  return CpuWay::kLibrary;
}

std::string cpu_table_summary(bool plain) {
  const Row& row = table_row();
  if (row.isa.empty()) return "the library's GEMM, then an epilogue (decode kernels: not measured)";
  std::string summary = "to M=" + std::to_string(row.decode.float32) + " (fp32), " +
                        std::to_string(row.decode.bfloat16) + " (bf16), " +
                        std::to_string(row.decode.float16) + " (fp16) decode kernels (" +
                        std::string(row.isa) + ")";
  if (plain && row.onednn_float32) {
    summary += ", fp32 to M=" + std::to_string(row.onednn_float32) +
               " and K=" + std::to_string(kOneDnnMostSummed) + " oneDNN's fused epilogue";
  }
  return summary + ", else the library's GEMM, then an epilogue";
}

bool force_cpu_way(std::string_view name) {
  if (name == "auto") {
    forced.reset();
  } else if (name == "decode") {
    forced = CpuWay::kDecode;
  } else if (name == "onednn") {
    forced = CpuWay::kOneDnn;
  } else if (name == "library") {
    forced = CpuWay::kLibrary;
  } else {
    return false;
  }
  return true;
}

}  // namespace tpkernels
