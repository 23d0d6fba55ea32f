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

// The precision that computes for what is stored as T.
template <typename T>
struct PrecisionOf {
  using type = T;
};
template <>
struct PrecisionOf<BFloat16> {
  using type = Half;
};
template <>
struct PrecisionOf<Float16> {
  using type = Half;
};

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

// out = source, or source + bias where there is a bias.
template <typename T, typename C>
TPK_INLINE void load(const void* source, const void* bias, const Unit& at, C* out) {
  const T* in = static_cast<const T*>(source) + at.offset;
  if (bias) {
    const T* added = static_cast<const T*>(bias) + at.col;
    for (int64_t i = 0; i < at.size; ++i) out[i] = widen(in[i]) + widen(added[i]);
  } else {
    for (int64_t i = 0; i < at.size; ++i) out[i] = widen(in[i]);
  }
}

template <typename T, typename C>
TPK_INLINE void store(const C* in, void* target, const Unit& at) {
  T* out = static_cast<T*>(target) + at.offset;
  for (int64_t i = 0; i < at.size; ++i) narrow(in[i], out[i]);
}

// The four maps on buffers. In and out may be the same buffer.
template <Activation A, typename P>
struct ActMap {
  using C = Real<P>;
  static void run(C* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) x[i] = activation<A, P>(x[i]).value;
  }
};
template <Activation A, typename P>
struct ActGradMap {
  using C = Real<P>;
  static void run(C* __restrict dy, const C* __restrict pre, int64_t size) {
    for (int64_t i = 0; i < size; ++i) dy[i] *= activation<A, P>(pre[i]).slope;
  }
};
template <Activation A, typename P>
struct GluMap {
  using C = Real<P>;
  static void run(C* __restrict gate, const C* __restrict up, int64_t size) {
    for (int64_t i = 0; i < size; ++i) gate[i] = activation<A, P>(gate[i]).value * up[i];
  }
};
template <Activation A, typename P>
struct GluGradMap {
  using C = Real<P>;
  // dy and gate become d_gate and d_up.
  static void run(C* __restrict dy, C* __restrict gate, const C* __restrict up, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const ValueAndSlope<C> a = activation<A, P>(gate[i]);
      gate[i] = dy[i] * a.value;
      dy[i] *= up[i] * a.slope;
    }
  }
};

// Map<A, P>::run for a run-time activation.
template <template <Activation, typename> class Map, typename P>
auto choose(Activation act) {
  using Function = decltype(&Map<Activation::kNone, P>::run);
  static constexpr Function kTable[] = {
      &Map<Activation::kNone, P>::run,     &Map<Activation::kGelu, P>::run,
      &Map<Activation::kGeluTanh, P>::run, &Map<Activation::kSilu, P>::run,
      &Map<Activation::kRelu, P>::run,     &Map<Activation::kRelu2, P>::run};
  return kTable[static_cast<int>(act)];
}

template <typename T>
void run(const BiasAct& p, int64_t unit_begin, int64_t unit_end) {
  using P = typename PrecisionOf<T>::type;
  const auto map = choose<ActMap, P>(p.act);
  Buffer<Real<P>> h;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.h, p.bias, at, h.data);
    if (p.pre) store<T>(h.data, p.pre, at);
    map(h.data, padded(at.size));
    store<T>(h.data, p.y, at);
  }
}

template <typename T>
void run(const ActGrad& p, int64_t unit_begin, int64_t unit_end) {
  using P = typename PrecisionOf<T>::type;
  const auto map = choose<ActGradMap, P>(p.act);
  Buffer<Real<P>> dy, pre;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.dy, nullptr, at, dy.data);
    load<T>(p.pre, nullptr, at, pre.data);
    map(dy.data, pre.data, padded(at.size));
    store<T>(dy.data, p.dx, at);
  }
}

template <typename T>
void run(const BiasGlu& p, int64_t unit_begin, int64_t unit_end) {
  using P = typename PrecisionOf<T>::type;
  const auto map = choose<GluMap, P>(p.act);
  Buffer<Real<P>> gate, up;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.g, p.bias_gate, at, gate.data);
    load<T>(p.u, p.bias_up, at, up.data);
    if (p.gate) store<T>(gate.data, p.gate, at);
    if (p.up) store<T>(up.data, p.up, at);
    map(gate.data, up.data, padded(at.size));
    store<T>(gate.data, p.y, at);
  }
}

template <typename T>
void run(const GluGrad& p, int64_t unit_begin, int64_t unit_end) {
  using P = typename PrecisionOf<T>::type;
  const auto map = choose<GluGradMap, P>(p.act);
  Buffer<Real<P>> dy, gate, up;
  for (int64_t u = unit_begin; u < unit_end; ++u) {
    const Unit at = unit_at(u, p.cols);
    load<T>(p.dy, nullptr, at, dy.data);
    load<T>(p.gate, nullptr, at, gate.data);
    load<T>(p.up, nullptr, at, up.data);
    map(dy.data, gate.data, up.data, padded(at.size));
    store<T>(dy.data, p.d_gate, at);
    store<T>(gate.data, p.d_up, at);
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
