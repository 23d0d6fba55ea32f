// The last step of a row-parallel GEMM: the ranks' partial sums become the output.
#pragma once

#include <cstdint>
#include <span>

#include "common/dtype.h"

namespace tpkernels {

// y [end - begin] = sum over sources of source[i] + bias[i % cols], for i in [begin, end) of a
// rows x cols matrix: in the order of the sources, in fp32, rounded once. bias [cols] may be null;
// it and y are of `dtype`, which is not fp64. Nothing needs more alignment than its elements.
void sum_partials(std::span<const float* const> sources, const void* bias, int64_t cols, void* y,
                  DType dtype, int64_t begin, int64_t end);

}  // namespace tpkernels
