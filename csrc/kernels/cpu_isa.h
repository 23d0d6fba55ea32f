// Which instruction sets this processor runs, of those that kernels are compiled for: the levels of
// x86-64 by the flags in tpkernels/build/compile.py. None elsewhere.
#pragma once

namespace tpkernels {

#if defined(__x86_64__)
// x86-64-v3, as far as the kernels use it.
inline bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

// x86-64-v4.
inline bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

inline bool runs_avx512bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

}  // namespace tpkernels
