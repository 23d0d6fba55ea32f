// The loops of epilogue_cpu.h, compiled once per instruction set by the epilogue_cpu_*.cpp files.
//
// Each unit is widened into buffers of the compute type, computed there and narrowed back, so that
// conversions and activations are written once and every loop vectorises. The buffers are computed
// to a multiple of kPad: a tail costs one more vector, not a scalar loop.
#pragma once

#include <cstdint>

#include "kernels/epilogue_cpu.h"

namespace tpkernels {
namespace {  // a copy for each instruction set

inline constexpr int64_t kPad = 16;

template <typename C>
struct alignas(64) Buffer {
  C data[kEpilogueBlock] = {};
};

// Where a unit lies: `offset` elements into a matrix, `col` into a row.
struct Unit {
  int64_t offset;
  int64_t col;
  int64_t size;
};

TPK_INLINE Unit unit_at(int64_t unit, int64_t cols) {
  const int64_t blocks = blocks_of(cols);
  const int64_t col = unit % blocks * kEpilogueBlock;
  const int64_t left = cols - col;
  return {unit / blocks * cols + col, col, left < kEpilogueBlock ? left : kEpilogueBlock};
}

TPK_INLINE int64_t padded(int64_t size) { return (size + kPad - 1) / kPad * kPad; }

template <typename T, typename C>
TPK_INLINE void load(const void* source, int64_t offset, C* out, int64_t size) {
  const T* in = static_cast<const T*>(source) + offset;
  for (int64_t i = 0; i < size; ++i) out[i] = widen(in[i]);
}

template <typename T, typename C>
TPK_INLINE void add(const void* source, int64_t offset, C* out, int64_t size) {
  const T* in = static_cast<const T*>(source) + offset;
  for (int64_t i = 0; i < size; ++i) out[i] += widen(in[i]);
}

template <typename T, typename C>
TPK_INLINE void store(const C* in, void* target, int64_t offset, int64_t size) {
  T* out = static_cast<T*>(target) + offset;
  for (int64_t i = 0; i < size; ++i) narrow(in[i], out[i]);
}

// The four maps on buffers. In and out may be the same buffer.
template <Activation A, typename C>
struct ActMap {
  static void run(C* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) x[i] = activation<A>(x[i]).value;
  }
};
template <Activation A, typename C>
struct ActGradMap {
  static void run(C* __restrict dy, const C* __restrict pre, int64_t size) {
    for (int64_t i = 0; i < size; ++i) dy[i] *= activation<A>(pre[i]).slope;
  }
};
template <Activation A, typename C>
struct GluMap {
  static void run(C* __restrict gate, const C* __restrict up, int64_t size) {
    for (int64_t i = 0; i < size; ++i) gate[i] = activation<A>(gate[i]).value * up[i];
  }
};
template <Activation A, typename C>
struct GluGradMap {
  // dy and gate become d_gate and d_up.
  static void run(C* __restrict dy, C* __restrict gate, const C* __restrict up, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const ValueAndSlope<C> a = activation<A>(gate[i]);
      gate[i] = dy[i] * a.value;
      dy[i] *= up[i] * a.slope;
    }
  }
};

// Map<A, C>::run for a run-time activation.
template <template <Activation, typename> class Map, typename C>
auto choose(Activation act) {
  using Function = decltype(&Map<Activation::kNone, C>::run);
  static constexpr Function kTable[] = {
      &Map<Activation::kNone, C>::run,     &Map<Activation::kGelu, C>::run,
      &Map<Activation::kGeluTanh, C>::run, &Map<Activation::kSilu, C>::run,
      &Map<Activation::kRelu, C>::run,     &Map<Activation::kRelu2, C>::run};
  return kTable[static_cast<int>(act)];
}

template <typename T>
void run(const BiasAct& p, int64_t unit_begin, int64_t unit_end) {
  using C = typename ComputeType<T>::type;
  const auto map = choose<ActMap, C>(p.act);
  Buffer<C> h;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.h, at.offset, h.data, at.size);
    if (p.bias) add<T>(p.bias, at.col, h.data, at.size);
    if (p.pre) store<T>(h.data, p.pre, at.offset, at.size);
    map(h.data, padded(at.size));
    store<T>(h.data, p.y, at.offset, at.size);
  }
}

template <typename T>
void run(const ActGrad& p, int64_t unit_begin, int64_t unit_end) {
  using C = typename ComputeType<T>::type;
  const auto map = choose<ActGradMap, C>(p.act);
  Buffer<C> dy, pre;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.dy, at.offset, dy.data, at.size);
    load<T>(p.pre, at.offset, pre.data, at.size);
    map(dy.data, pre.data, padded(at.size));
    store<T>(dy.data, p.dx, at.offset, at.size);
  }
}

template <typename T>
void run(const BiasGlu& p, int64_t unit_begin, int64_t unit_end) {
  using C = typename ComputeType<T>::type;
  const auto map = choose<GluMap, C>(p.act);
  Buffer<C> gate, up;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.g, at.offset, gate.data, at.size);
    load<T>(p.u, at.offset, up.data, at.size);
    if (p.bias_gate) add<T>(p.bias_gate, at.col, gate.data, at.size);
    if (p.bias_up) add<T>(p.bias_up, at.col, up.data, at.size);
    if (p.gate) store<T>(gate.data, p.gate, at.offset, at.size);
    if (p.up) store<T>(up.data, p.up, at.offset, at.size);
    map(gate.data, up.data, padded(at.size));
    store<T>(gate.data, p.y, at.offset, at.size);
  }
}

template <typename T>
void run(const GluGrad& p, int64_t unit_begin, int64_t unit_end) {
  using C = typename ComputeType<T>::type;
  const auto map = choose<GluGradMap, C>(p.act);
  Buffer<C> dy, gate, up;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.dy, at.offset, dy.data, at.size);
    load<T>(p.gate, at.offset, gate.data, at.size);
    load<T>(p.up, at.offset, up.data, at.size);
    map(dy.data, gate.data, up.data, padded(at.size));
    store<T>(dy.data, p.d_gate, at.offset, at.size);
    store<T>(gate.data, p.d_up, at.offset, at.size);
  }
}

template <typename Params>
void run_dtype(const Params& p, int64_t unit_begin, int64_t unit_end) {
  switch (p.dtype) {
    case DType::kFloat64:
      return run<double>(p, unit_begin, unit_end);
    case DType::kFloat32:
      return run<float>(p, unit_begin, unit_end);
    case DType::kBFloat16:
      return run<BFloat16>(p, unit_begin, unit_end);
    case DType::kFloat16:
      return run<Float16>(p, unit_begin, unit_end);
  }
}

constexpr EpilogueKernels make_epilogue_kernels(const char* isa) {
  return {isa, &run_dtype<BiasAct>, &run_dtype<ActGrad>, &run_dtype<BiasGlu>, &run_dtype<GluGrad>};
}

}  // namespace
}  // namespace tpkernels
