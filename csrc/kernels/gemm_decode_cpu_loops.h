// The loops of gemm_decode_cpu.h, compiled once per instruction set by the gemm_decode_cpu_*.cpp
// files.
//
// Both operands lie along the summed dimension, so a tile of rows x columns of the output is that
// many vectors of partial sums in registers: for each vector's worth of K, `rows` loads of x and
// `columns` of the weight, rows * columns multiplications. Its sums go to a buffer; what is done to
// each of them happens there, in vectors along the columns:
//
//   for each kDecodeColumns columns
//     for each kBufferRows rows
//       for each panel of weight rows             from memory, at the first rows
//         for each tile of rows                   from the first-level cache, at the others
//           sums[row][column] = x[row] . weight[column]
//       bias, activation, rounding
#pragma once

#include <cstdint>

#include "kernels/epilogue_cpu_loops.h"
#include "kernels/gemm_decode_cpu.h"
#include "kernels/gemm_decode_cpu_vectors.h"

// Loops over registers, which must not be left as loops.
#if defined(__clang__)
#define TPK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TPK_UNROLL _Pragma("GCC unroll 16")
#endif

namespace tpkernels {
namespace {  // a copy for each instruction set

// Rows that are summed before the activation is applied: the buffers are then 12 KB each.
inline constexpr int64_t kBufferRows = 32;

using SumsRow = float[kDecodeColumns];

template <typename T>
struct Matrix {
  const T* data;
  int64_t stride;

  const T* row(int64_t index) const { return data + index * stride; }
  Matrix from_row(int64_t index) const { return {row(index), stride}; }
};

// out[i][j] = x[i] . weight[j] for i < kRows and j < kColumns; rows of the weight from `columns` on
// are the last one again.
template <typename T, int kRows, int kColumns>
void tile(Matrix<T> x, Matrix<T> weight, int64_t columns, int64_t k, SumsRow* out, int64_t column) {
  using Op = Operand<T>;
  Floats sums[kRows * kColumns];  // row by row
  TPK_UNROLL
  for (Floats& sum : sums) sum = Floats{};
  const T* rows[kColumns];
  TPK_UNROLL
  for (int j = 0; j < kColumns; ++j) rows[j] = weight.row(j < columns ? j : columns - 1);
  // The same place in the panel after this one, fetched into the second-level cache: weights from
  // memory come 1.3 to 1.5 times faster, those from the last-level cache 7 % slower (2.4 MB of bf16
  // at one row: 28.8 us for 26.8; EPYC, November 2026). (Into the first level: slower for both,
  // since a panel is as large as that.) Past the end it fetches nothing.
  const int64_t ahead = weight.stride * kColumns;
  int64_t at = 0;
  for (; at + Op::kStep <= k; at += Op::kStep) {
    typename Op::Vector a[kRows];
    TPK_UNROLL
    for (int i = 0; i < kRows; ++i) a[i] = Op::load(x.row(i) + at);
    TPK_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const typename Op::Vector b = Op::load(rows[j] + at);
      __builtin_prefetch(rows[j] + at + ahead, 0, 2);
      TPK_UNROLL
      for (int i = 0; i < kRows; ++i) Op::dot(sums[i * kColumns + j], a[i], b);
    }
  }
  if (at < k) {
    typename Op::Vector a[kRows];
    TPK_UNROLL
    for (int i = 0; i < kRows; ++i) a[i] = Op::load_tail(x.row(i) + at, k - at);
    TPK_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const typename Op::Vector b = Op::load_tail(rows[j] + at, k - at);
      TPK_UNROLL
      for (int i = 0; i < kRows; ++i) Op::dot(sums[i * kColumns + j], a[i], b);
    }
  }
  float flat[kRows * kColumns];
  store_sums<kRows * kColumns>(sums, flat);
  for (int i = 0; i < kRows; ++i) {
    __builtin_memcpy(out[i] + column, flat + i * kColumns, sizeof(float) * kColumns);
  }
}

// As many sums as leave registers for the operands: 4 x 4, 3 x 8, 2 x 8 and 1 x 8, or 2 x 4 and
// 1 x 4. Measured with 32 registers: 4 x 6 is slower by 2 to 10 %, 1 x 16 by 10 to 60 %.
inline constexpr int kMaxTileRows = kManyRegisters ? 4 : 2;
inline constexpr int kHighTileColumns = 4;  // where there are tiles of kMaxTileRows
inline constexpr int kTileColumns = kManyRegisters ? 8 : 4;
static_assert(kDecodeColumns % kHighTileColumns == 0 && kDecodeColumns % kTileColumns == 0);

template <typename T>
using TileFunction = void (*)(Matrix<T>, Matrix<T>, int64_t, int64_t, SumsRow*, int64_t);

template <typename T, int kColumns>
TileFunction<T> tile_of(int64_t rows) {
  if constexpr (kManyRegisters) {
    if (rows == 4) return &tile<T, 4, kColumns>;
    if (rows == 3) return &tile<T, 3, kColumns>;
  }
  return rows == 2 ? &tile<T, 2, kColumns> : &tile<T, 1, kColumns>;
}

// sums = x weight^T for `rows` of x and `columns` of the output.
template <typename T, int kColumns>
void multiply(Matrix<T> x, int64_t rows, Matrix<T> weight, int64_t columns, int64_t k,
              SumsRow* sums) {
  // Tiles of nearly equal heights: `tiles` of them, the first `higher` one row more.
  const int64_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  const int64_t low = rows / tiles, higher = rows % tiles;
  const TileFunction<T> high_tile = tile_of<T, kColumns>(low + 1);
  const TileFunction<T> low_tile = tile_of<T, kColumns>(low);
  for (int64_t column = 0; column < columns; column += kColumns) {
    const int64_t left = columns - column < kColumns ? columns - column : kColumns;
    const Matrix<T> panel = weight.from_row(column);
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
      (i < higher ? high_tile : low_tile)(x.from_row(row), panel, left, k, sums + row, column);
      row += i < higher ? low + 1 : low;
    }
  }
}

template <typename T>
void multiply(Matrix<T> x, int64_t rows, const void* weight, int64_t stride, int64_t column,
              int64_t columns, int64_t k, SumsRow* sums) {
  const Matrix<T> part = Matrix<T>{static_cast<const T*>(weight), stride}.from_row(column);
  // Heights of tiles differ by 1 at most: some are kMaxTileRows high unless all can be lower.
  const bool high = (rows + kMaxTileRows - 1) / kMaxTileRows * (kMaxTileRows - 1) < rows;
  (high ? &multiply<T, kHighTileColumns> : &multiply<T, kTileColumns>)(x, rows, part, columns, k,
                                                                       sums);
}

// sums[i] += bias.
template <typename T>
TPK_INLINE void add(const void* bias, int64_t column, int64_t columns, float* sums) {
  if (!bias) return;
  const T* added = static_cast<const T*>(bias) + column;
  for (int64_t j = 0; j < columns; ++j) sums[j] += widen(added[j]);
}

template <typename Out>
TPK_INLINE void store_row(const float* values, int64_t columns, void* target, int64_t offset) {
  if (!target) return;
  Out* out = static_cast<Out*>(target) + offset;
  for (int64_t j = 0; j < columns; ++j) narrow(values[j], out[j]);
}

template <typename T, typename Out>
void run_as(const DecodeGemm& p, int64_t n_begin, int64_t n_end) {
  using P = typename PrecisionOf<T>::type;
  const auto act = choose<ActMap, P>(p.act);
  const auto glu = choose<GluMap, P>(p.act);
  const Matrix<T> x{static_cast<const T*>(p.x), p.x_stride};
  alignas(64) SumsRow up[kBufferRows], gate[kBufferRows];
  for (int64_t column = n_begin; column < n_end; column += kDecodeColumns) {
    const int64_t left = n_end - column;
    const int64_t columns = left < kDecodeColumns ? left : kDecodeColumns;
    for (int64_t first = 0; first < p.m; first += kBufferRows) {
      const int64_t rows = p.m - first < kBufferRows ? p.m - first : kBufferRows;
      const Matrix<T> x_part = x.from_row(first);
      multiply<T>(x_part, rows, p.weight, p.weight_stride, column, columns, p.k, up);
      if (p.gate) multiply<T>(x_part, rows, p.gate, p.weight_stride, column, columns, p.k, gate);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t offset = (first + i) * p.y_stride + column;
        // The activation is computed in whole vectors: what is beyond the row is a number.
        for (int64_t j = columns; j < padded(columns); ++j) up[i][j] = gate[i][j] = 0;
        add<T>(p.bias, column, columns, up[i]);
        store_row<Out>(up[i], columns, p.pre, offset);
        float* y = up[i];
        if (p.gate) {
          y = gate[i];
          add<T>(p.bias_gate, column, columns, y);
          store_row<Out>(y, columns, p.pre_gate, offset);
          glu(y, up[i], padded(columns));
        } else if (p.act != Activation::kNone) {
          act(y, padded(columns));
        }
        store_row<Out>(y, columns, p.y, offset);
      }
    }
  }
}

template <typename T>
void run_dtype_as(const DecodeGemm& p, int64_t n_begin, int64_t n_end) {
  (p.out == p.dtype ? &run_as<T, T> : &run_as<T, float>)(p, n_begin, n_end);
}

void run_decode(const DecodeGemm& p, int64_t n_begin, int64_t n_end) {
  switch (p.dtype) {
    case DType::kFloat64:
      return;  // not served, see DecodeGemm
    case DType::kFloat32:
      return run_as<float, float>(p, n_begin, n_end);
    case DType::kBFloat16:
      return run_dtype_as<BFloat16>(p, n_begin, n_end);
    case DType::kFloat16:
      return run_dtype_as<Float16>(p, n_begin, n_end);
  }
}

constexpr DecodeKernels make_decode_kernels(const char* isa) { return {isa, &run_decode}; }

}  // namespace
}  // namespace tpkernels
