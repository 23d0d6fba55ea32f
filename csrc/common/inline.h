// How the code that is compiled once per instruction set is inlined.
#pragma once

// Internal linkage and always inlined: the same header is compiled for several instruction sets
// into one library, and an out-of-line copy made for AVX-512 must never be the one the linker
// keeps.
#define TPK_INLINE static inline __attribute__((always_inline))
