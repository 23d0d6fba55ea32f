// M tokens, K in-features of this rank, N out-features, F_r this rank's part of d_ff, R ranks.
#include "ops/peer_ops_cpu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "kernels/gemm_decode_cpu.h"
#include "kernels/sum_partials_cpu.h"
#include "ops/checks.h"
#include "ops/interpreter.h"
#include "ops/matmul.h"
#include "runtime/peer_groups.h"

namespace tpkernels {
namespace {

using Optional = std::optional<at::Tensor>;

// Above this, and between more than two ranks, each rank sums its part and the others read that: a
// rank then reads 2 (R - 1) / R of the partial sums instead of R - 1.
constexpr int64_t kOneStepBytes = 128 << 10;  // ASSUMPTION: as all_reduce's threshold

std::shared_ptr<PeerGroup> peers(std::string_view group_name) {
  std::shared_ptr<PeerGroup> group = find_peer_group(std::string(group_name));
  TORCH_CHECK(group != nullptr, "no peer group is called '", group_name,
              "'. Fix: tpkernels.init_mesh, or init_process_group('cpu:tpshm')");
  return group;
}

ElementType element_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kLong:
      return ElementType::kInt64;
    case at::kInt:
      return ElementType::kInt32;
    case at::kShort:
      return ElementType::kInt16;
    case at::kChar:
      return ElementType::kInt8;
    case at::kByte:
      return ElementType::kUInt8;
    case at::kBool:
      return ElementType::kBool;
    default:
      TORCH_CHECK_TYPE(false, "all_reduce: ", tensor.scalar_type(), " cannot be reduced");
  }
}

std::optional<Reduction> known_reduction(std::string_view name) {
  if (name == "sum") return Reduction::kSum;
  if (name == "avg") return Reduction::kAvg;
  if (name == "max") return Reduction::kMax;
  if (name == "min") return Reduction::kMin;
  return std::nullopt;
}

Reduction reduction_of(std::string_view name) {
  if (const std::optional<Reduction> known = known_reduction(name)) return *known;
  TORCH_CHECK_VALUE(false, "all_reduce: op='", name, "' is not known; allowed: sum, avg, max, min");
}

// One for all that ends in a row-parallel GEMM: a rank that computes the whole MLP in one call and
// one that does not, for a gradient's sake, reduce the same.
Signature signature_of(int64_t rows, int64_t cols, DType dtype) {
  Signature signature;
  signature.collective = Collective::kGemmAllReduce;
  signature.type = dtype == DType::kFloat32    ? ElementType::kFloat32
                   : dtype == DType::kBFloat16 ? ElementType::kBFloat16
                                               : ElementType::kFloat16;
  signature.reduction = Reduction::kSum;
  signature.add_dim(rows);
  signature.add_dim(cols);
  return signature;
}

// y [M, N] = sum over ranks of partial_r [M, N] + bias, where `write` makes this rank's partial
// sums in the memory it is given: its slot, so that they are never copied.
template <class Write>
void reduce_partials(PeerGroup& group, const Signature& signature, const at::Tensor& y_MN,
                     const Optional& bias, const Write& write) {
  const int64_t total = y_MN.numel(), cols = y_MN.size(1);
  const DType dtype = dtype_of(y_MN);
  const void* const bias_data = bias ? bias->const_data_ptr() : nullptr;
  auto* const y = static_cast<std::byte*>(y_MN.mutable_data_ptr());
  const int rank = group.rank(), world = group.world();

  PeerGroup::Operation operation(group, signature);
  write(reinterpret_cast<float*>(operation.begin(total * sizeof(float))));
  operation.publish();
  operation.wait_all();
  std::vector<const float*> sources;
  for (int peer = 0; peer < world; ++peer) {
    sources.push_back(reinterpret_cast<const float*>(operation.slot(peer)));
  }
  if (world <= 2 || total * static_cast<int64_t>(sizeof(float)) <= kOneStepBytes) {
    sum_partials(sources, bias_data, cols, y, dtype, 0, total);
    operation.finish();
    return;
  }
  const auto part = [&](int of) { return total * of / world; };
  const int64_t size = y_MN.element_size();
  std::byte* const own = operation.begin((part(rank + 1) - part(rank)) * size);
  // `sources` of the step before stay readable until this one is published.
  sum_partials(sources, bias_data, cols, own, dtype, part(rank), part(rank + 1));
  operation.publish();
  for (int distance = 0; distance < world; ++distance) {
    const int peer = (rank + distance) % world;
    operation.wait(peer);
    const std::byte* theirs = operation.slot(peer);
    std::copy(theirs, theirs + (part(peer + 1) - part(peer)) * size, y + part(peer) * size);
  }
  operation.finish();
}

// The same in blocks of rows whose partial sums fit a slot: write(y's rows, partial sums).
template <class Write>
void reduce_rows(PeerGroup& group, const at::Tensor& y_MN, const Optional& bias,
                 const Write& write) {
  const int64_t rows = y_MN.size(0), cols = y_MN.size(1);
  const int64_t slot = PeerMemory::kSlotBytes / sizeof(float);
  const int64_t most = std::max<int64_t>(1, slot / std::max<int64_t>(cols, 1));
  int64_t row = 0;
  do {
    const int64_t end = std::min(rows, row + most);
    const at::Tensor y = y_MN.slice(0, row, end);
    reduce_partials(group, signature_of(end - row, cols, dtype_of(y)), y, bias,
                    [&](float* partial) { write(row, end, partial); });
    row = end;
  } while (row < rows);
}

// Rows of adjacent elements, as the kernel reads them.
at::Tensor rows_of(const at::Tensor& x) { return has_contiguous_rows(x) ? x : x.contiguous(); }

Optional contiguous(const Optional& tensor) {
  return tensor ? Optional(tensor->contiguous()) : std::nullopt;
}

const void* data_of(const Optional& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// All that it reads has rows of adjacent elements, all that it writes is contiguous.
DecodeGemm gemm_of(const at::Tensor& x_MK, const at::Tensor& weight, void* y, DType out) {
  DecodeGemm gemm{};
  gemm.x = x_MK.const_data_ptr();
  gemm.x_stride = x_MK.stride(0);
  gemm.weight = weight.const_data_ptr();
  gemm.weight_stride = weight.stride(0);
  gemm.y = y;
  gemm.y_stride = weight.size(0);
  gemm.m = x_MK.size(0);
  gemm.n = weight.size(0);
  gemm.k = weight.size(1);
  gemm.dtype = dtype_of(x_MK);
  gemm.out = out;
  return gemm;
}

void all_reduce_in_place(PeerGroup& group, const at::Tensor& x, Reduction reduction) {
  void* const data = x.mutable_data_ptr();
  const ElementType type = element_type(x);
  CallOptions options;
  options.shape = {x.sizes().data(), x.sizes().size()};
  without_interpreter([&] { all_reduce(group, data, data, x.numel(), type, reduction, options); });
}

}  // namespace

void all_reduce_peer_(at::Tensor x, std::string_view group_name, std::string_view reduction) {
  const std::shared_ptr<PeerGroup> group = peers(group_name);
  const at::Tensor whole = x.contiguous();
  all_reduce_in_place(*group, whole, reduction_of(reduction));
  if (!whole.is_same(x)) x.copy_(whole);
}

bool all_reduce_contiguous(const at::Tensor& x, const std::string& group_name,
                           std::string_view reduction) {
  const std::optional<Reduction> how = known_reduction(reduction);
  if (!how || !x.device().is_cpu() || x.layout() != at::kStrided || x.is_neg() || x.is_conj() ||
      !x.is_contiguous()) {
    return false;
  }
  const std::shared_ptr<PeerGroup> group = find_peer_group(group_name);
  if (!group) return false;
  all_reduce_in_place(*group, x, *how);
  return true;
}

at::Tensor gemm_all_reduce_fused(const at::Tensor& x, const at::Tensor& weight,
                                 const Optional& bias, std::string_view group_name) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_gemm("gemm_all_reduce", x, "weight", weight, "bias", bias);
  const std::shared_ptr<PeerGroup> group = peers(group_name);
  const at::Tensor x_MK = rows_of(as_matrix(x)), weight_NK = rows_of(weight);
  const at::Tensor y_MN = at::empty({x_MK.size(0), weight.size(0)}, x.options());
  const Optional row = contiguous(bias);
  without_interpreter([&] {
    reduce_rows(*group, y_MN, row, [&](int64_t begin, int64_t end, float* partial) {
      const at::Tensor x_rows = x_MK.slice(0, begin, end);
      run_decode(gemm_of(x_rows, weight_NK, partial, DType::kFloat32));
    });
  });
  return y_MN.view(with_last_size(x, weight.size(0)));
}

at::Tensor mlp_fused(const at::Tensor& x, const at::Tensor& w_up, const Optional& b_up,
                     const Optional& w_gate, const Optional& b_gate, const at::Tensor& w_down,
                     const Optional& b_down, std::string_view act, std::string_view group_name) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Activation activation = parse_activation(act);
  check_gemm("mlp", x, "w_up", w_up, "b_up", b_up);
  if (w_gate) {
    check_gemm("mlp", x, "w_gate", *w_gate, "b_gate", b_gate);
    check_same_shape("mlp", "w_gate", *w_gate, "w_up", w_up);
  }
  check_gate("mlp", w_gate, b_gate);
  const std::shared_ptr<PeerGroup> group = peers(group_name);
  const at::Tensor x_MK = rows_of(as_matrix(x)), up_FK = rows_of(w_up);
  Optional gate_FK = w_gate ? Optional(rows_of(*w_gate)) : std::nullopt;
  at::Tensor up = up_FK;
  if (gate_FK && gate_FK->stride(0) != up_FK.stride(0)) {  // the kernel has one stride for both
    gate_FK = gate_FK->contiguous();
    up = up_FK.contiguous();
  }
  const Optional up_bias = contiguous(b_up), gate_bias = contiguous(b_gate);
  const at::Tensor down_NF = rows_of(w_down);
  const at::Tensor h_MF = at::empty({x_MK.size(0), w_up.size(0)}, x.options());
  check_gemm("mlp", h_MF, "w_down", w_down, "b_down", b_down);
  const at::Tensor y_MN = at::empty({x_MK.size(0), w_down.size(0)}, x.options());

  DecodeGemm first = gemm_of(x_MK, up, h_MF.mutable_data_ptr(), dtype_of(x));
  first.gate = gate_FK ? weight_data(*gate_FK) : nullptr;
  first.bias = data_of(up_bias);
  first.bias_gate = data_of(gate_bias);
  first.act = activation;
  const Optional row = contiguous(b_down);
  without_interpreter([&] {
    run_decode(first);
    reduce_rows(*group, y_MN, row, [&](int64_t begin, int64_t end, float* partial) {
      const at::Tensor h_rows = h_MF.slice(0, begin, end);
      run_decode(gemm_of(h_rows, down_NF, partial, DType::kFloat32));
    });
  });
  return y_MN.view(with_last_size(x, w_down.size(0)));
}

}  // namespace tpkernels

TORCH_LIBRARY_FRAGMENT(tpkernels, library) {
  using torch::dispatch;
  library.def("all_reduce_peer_(Tensor(a!) x, str group_name, str reduction) -> ()",
              {at::Tag::pt2_compliant_tag});
  library.def(
      "gemm_all_reduce_fused(Tensor x, Tensor weight, Tensor? bias, str group_name) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "mlp_fused(Tensor x, Tensor w_up, Tensor? b_up, Tensor? w_gate, Tensor? b_gate, Tensor "
      "w_down, Tensor? b_down, str act, str group_name) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  library.impl("all_reduce_peer_",
               dispatch(c10::DispatchKey::CPU, TORCH_FN(tpkernels::all_reduce_peer_)));
  library.impl("gemm_all_reduce_fused",
               dispatch(c10::DispatchKey::CPU, TORCH_FN(tpkernels::gemm_all_reduce_fused)));
  library.impl("mlp_fused", dispatch(c10::DispatchKey::CPU, TORCH_FN(tpkernels::mlp_fused)));
}
