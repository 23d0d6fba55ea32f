#include "cpu_table.h"

#include <cstdint>
#include <string>

#include "ops/cpu_table.h"

namespace tpkernels {

void bind_cpu_table(pybind11::module_& module) {
  module.def("cpu_table_summary", &cpu_table_summary, pybind11::arg("plain"),
             "Which way the fused GEMMs of CPU tensors go on this processor, in words; plain: "
             "gemm_act alone, without a gate or other "
             "outputs.");
  module.def(
      "decode_rows",
      [](const std::string& dtype) -> int64_t {
        if (dtype == "float32") return decode_rows(DType::kFloat32);
        if (dtype == "bfloat16") return decode_rows(DType::kBFloat16);
        return dtype == "float16" ? decode_rows(DType::kFloat16) : 0;
      },
      pybind11::arg("dtype"),
      "The most rows for which the decode kernels are the fastest way; 0: never.");
  module.def(
      "force_cpu_way", &force_cpu_way,
      "For benches: \"decode\", \"onednn\" or \"library\" wherever it can serve, \"auto\" for "
      "the table again; False for another name.");
}

}  // namespace tpkernels
