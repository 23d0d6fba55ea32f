// What moves elements from rank to rank as they are: broadcast, the gathers, scatter, all-to-all;
// and the barrier of the tpshm backend.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "c10d/call_options.h"
#include "c10d/tensor_buffers.h"
#include "c10d/tpshm_backend.h"

namespace tpkernels {
namespace {

using c10d::OpType;
using WorkPtr = TpshmBackend::WorkPtr;
using Tensors = TpshmBackend::Tensors;

bool all_dense(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_dense);
}

void check_same_type(const char* what, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), "tpshm: ", what, " with tensors of ",
                    a.scalar_type(), " and ", b.scalar_type(), ". Fix: give all the same dtype");
}

void check_count(const char* what, size_t given, int world) {
  TORCH_CHECK_VALUE(given == static_cast<size_t>(world), "tpshm: ", what, " with a list of ", given,
                    " tensors; allowed is one for each of ", world, " ranks");
}

void check_elements(const char* what, int rank, const at::Tensor& theirs, const at::Tensor& own) {
  TORCH_CHECK_VALUE(theirs.numel() == own.numel(), "tpshm: ", what, ": the tensor for rank ", rank,
                    " has shape ", theirs.sizes(), ", this rank's ", own.sizes(),
                    ". Fix: give both the same shape");
}

// Tensors of one type, a tensor a rank, to be read or written.
template <typename Buffer, typename Pointer>
class Parts {
 public:
  explicit Parts(const Tensors& tensors) {
    buffers_.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      buffers_.emplace_back(tensor);
      pointers.push_back(buffers_.back().data());
      counts.push_back(tensor.numel() * moved_unit(tensor.scalar_type()).per_element);
    }
  }
  void store() {
    for (Buffer& buffer : buffers_) buffer.store();
  }

  std::vector<Pointer> pointers;
  std::vector<int64_t> counts;  // in units

 private:
  std::vector<Buffer> buffers_;
};
using Inputs = Parts<Input, const void*>;
using Outputs = Parts<Output, void*>;

// One tensor's rows, of which sizes[r] are rank r's; empty: as many for each.
std::vector<int64_t> counts_of_rows(const char* name, const at::Tensor& tensor,
                                    const std::vector<int64_t>& sizes, int world) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, "tpshm: all_to_all of a tensor without dimensions (", name,
                    "). Fix: give it one, as by view(1)");
  const int64_t rows = tensor.size(0);
  std::vector<int64_t> counts = sizes;
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(rows % world == 0, "tpshm: all_to_all: the ", name, " has ", rows,
                      " rows, which ", world, " ranks do not divide. Fix: give split sizes");
    counts.assign(world, rows / world);
  }
  check_count("all_to_all: split sizes", counts.size(), world);
  TORCH_CHECK_VALUE(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == rows &&
                        *std::min_element(counts.begin(), counts.end()) >= 0,
                    "tpshm: all_to_all: split sizes ", at::IntArrayRef(counts), " of the ", name,
                    ", which has ", rows, " rows. Fix: sizes of at least 0 with that sum");
  int64_t row = moved_unit(tensor.scalar_type()).per_element;
  for (int64_t dim = 1; dim < tensor.dim(); ++dim) row *= tensor.size(dim);
  for (int64_t& count : counts) count *= row;
  return counts;
}

template <typename Byte, typename Pointer>
std::vector<Pointer> consecutive(Pointer base, const std::vector<int64_t>& counts,
                                 ElementType type) {
  std::vector<Pointer> pointers;
  Byte* at = static_cast<Byte*>(base);
  for (const int64_t count : counts) {
    pointers.push_back(at);
    at += count * bytes_of(type);
  }
  return pointers;
}

// `output` [R * n] = `input` [n] of every rank.
void all_gather_single(PeerGroup& group, const at::Tensor& output, const at::Tensor& input,
                       std::optional<Seconds> limit) {
  const Unit unit = moved_unit(input.scalar_type());
  const Input own(input);
  Output all(output);
  const std::vector<int64_t> counts(group.world(), input.numel() * unit.per_element);
  const auto parts = consecutive<std::byte>(all.data(), counts, unit.type);
  all_gather(group, own.data(), parts, counts, unit.type, call_options(input, limit));
  all.store();
}

void check_single(const at::Tensor& output, const at::Tensor& input, int world) {
  check_same_type("all_gather", output, input);
  TORCH_CHECK_VALUE(
      output.numel() == input.numel() * world, "tpshm: all_gather of a tensor of ", input.sizes(),
      " into one of ", output.sizes(), ": allowed is an output of ", world,
      " (ranks) times as many elements. Fix: make the output of numel * world size elements");
}

// `outputs` = `input` of every rank.
void all_gather_list(PeerGroup& group, const Tensors& outputs, const at::Tensor& input,
                     std::optional<Seconds> limit) {
  const Input own(input);
  Outputs parts(outputs);
  const bool even = std::all_of(parts.counts.begin(), parts.counts.end(),
                                [&](int64_t count) { return count == parts.counts[0]; });
  all_gather(group, own.data(), parts.pointers, parts.counts, moved_unit(input.scalar_type()).type,
             even ? call_options(input, limit) : CallOptions{{}, limit});
  parts.store();
}

}  // namespace

void TpshmBackend::check_root(const char* what, int root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, "tpshm: ", what, " with root ", root,
                    "; allowed: a rank of the group, 0 to ", size_ - 1);
}

WorkPtr TpshmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (tensors.size() != 1 || opts.rootTensor != 0 || !is_dense(tensors[0])) {
    return rest().broadcast(tensors, opts);
  }
  const int root = static_cast<int>(opts.rootRank);
  check_root("broadcast", root);
  return launch({OpType::BROADCAST, "tpshm:broadcast", tensors, {tensors}, is_asynchronous(opts)},
                [tensor = tensors[0], root, limit = time_limit(opts)](PeerGroup& group) {
                  const Unit unit = moved_unit(tensor.scalar_type());
                  Output data(tensor);
                  if (group.rank() == root) data.load();
                  tpkernels::broadcast(group, data.data(), tensor.numel() * unit.per_element,
                                       unit.type, root, call_options(tensor, limit));
                  if (group.rank() != root) data.store();
                });
}

WorkPtr TpshmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1 || !all_dense(outputs[0]) || !all_dense(inputs)) {
    return rest().allgather(outputs, inputs, opts);
  }
  check_count("all_gather", outputs[0].size(), size_);
  for (const at::Tensor& output : outputs[0]) check_same_type("all_gather", output, inputs[0]);
  check_elements("all_gather", rank_, outputs[0][rank_], inputs[0]);
  return launch({OpType::ALLGATHER, "tpshm:all_gather", inputs, outputs, is_asynchronous(opts)},
                [outputs = outputs[0], input = inputs[0], limit = time_limit(opts)](
                    PeerGroup& group) { all_gather_list(group, outputs, input, limit); });
}

WorkPtr TpshmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& opts) {
  if (!is_dense(output) || !is_dense(input)) return rest()._allgather_base(output, input, opts);
  check_single(output, input, size_);
  const Tensors inputs = {input};
  return launch(
      {OpType::_ALLGATHER_BASE, "tpshm:all_gather", inputs, {{output}}, is_asynchronous(opts)},
      [output, input, limit = time_limit(opts)](PeerGroup& group) {
        all_gather_single(group, output, input, limit);
      });
}

WorkPtr TpshmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  check_count("all_gather_coalesced", outputs.size(), size_);
  bool dense = all_dense(inputs);
  for (const Tensors& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "tpshm: all_gather_coalesced of ",
                      inputs.size(), " tensors into ", of_rank.size(),
                      ". Fix: give each rank's list as many outputs as there are inputs");
    dense = dense && all_dense(of_rank);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_same_type("all_gather_coalesced", of_rank[i], inputs[i]);
    }
  }
  if (!dense) return rest().allgather_coalesced(outputs, inputs, opts);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_elements("all_gather_coalesced", rank_, outputs[rank_][i], inputs[i]);
  }
  return launch(
      {OpType::ALLGATHER_COALESCED, "tpshm:all_gather", inputs, outputs, is_asynchronous(opts)},
      [outputs, inputs, limit = time_limit(opts)](PeerGroup& group) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors of_input;
          for (const Tensors& of_rank : outputs) of_input.push_back(of_rank[i]);
          all_gather_list(group, of_input, inputs[i], limit);
        }
      });
}

WorkPtr TpshmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "tpshm: all_gather of ", inputs.size(),
                    " tensors into ", outputs.size(), ". Fix: give as many outputs as inputs");
  if (!all_dense(outputs) || !all_dense(inputs)) {
    return rest().allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  for (size_t i = 0; i < inputs.size(); ++i) check_single(outputs[i], inputs[i], size_);
  return launch({OpType::COALESCED, "tpshm:all_gather", inputs, {outputs}, is_asynchronous(opts)},
                [outputs, inputs, limit = time_limit(opts)](PeerGroup& group) {
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    all_gather_single(group, outputs[i], inputs[i], limit);
                  }
                });
}

WorkPtr TpshmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("gather", root);
  const bool receives = rank_ == root;
  if (inputs.size() != 1 || !is_dense(inputs[0])) return rest().gather(outputs, inputs, opts);
  TORCH_CHECK_VALUE(outputs.size() == (receives ? 1 : 0), "tpshm: gather with ", outputs.size(),
                    " lists of outputs; allowed is one on the root, ", root,
                    ", and none elsewhere");
  if (receives) {
    check_count("gather", outputs[0].size(), size_);
    for (int rank = 0; rank < size_; ++rank) {
      TORCH_CHECK_VALUE(is_dense(outputs[0][rank]),
                        "tpshm: gather into a tensor that is not dense or not on the CPU");
      check_same_type("gather", outputs[0][rank], inputs[0]);
      check_elements("gather", rank, outputs[0][rank], inputs[0]);
    }
  }
  return launch({OpType::GATHER, "tpshm:gather", inputs, outputs, is_asynchronous(opts)},
                [outputs = receives ? outputs[0] : Tensors(), input = inputs[0], root,
                 limit = time_limit(opts)](PeerGroup& group) {
                  const Unit unit = moved_unit(input.scalar_type());
                  const Input own(input);
                  Outputs parts(outputs);
                  const std::vector<int64_t> counts(group.world(),
                                                    input.numel() * unit.per_element);
                  tpkernels::gather(group, own.data(), parts.pointers, counts, unit.type, root,
                                    call_options(input, limit));
                  parts.store();
                });
}

WorkPtr TpshmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("scatter", root);
  const bool sends = rank_ == root;
  if (outputs.size() != 1 || !is_dense(outputs[0])) return rest().scatter(outputs, inputs, opts);
  TORCH_CHECK_VALUE(inputs.size() == (sends ? 1 : 0), "tpshm: scatter with ", inputs.size(),
                    " lists of inputs; allowed is one on the root, ", root, ", and none elsewhere");
  if (sends) {
    check_count("scatter", inputs[0].size(), size_);
    for (int rank = 0; rank < size_; ++rank) {
      TORCH_CHECK_VALUE(is_dense(inputs[0][rank]),
                        "tpshm: scatter of a tensor that is not dense or not on the CPU");
      check_same_type("scatter", inputs[0][rank], outputs[0]);
      check_elements("scatter", rank, inputs[0][rank], outputs[0]);
    }
  }
  const Tensors none;
  return launch({OpType::SCATTER,
                 "tpshm:scatter",
                 sends ? inputs[0] : none,
                 {outputs},
                 is_asynchronous(opts)},
                [output = outputs[0], inputs = sends ? inputs[0] : none, root,
                 limit = time_limit(opts)](PeerGroup& group) {
                  const Unit unit = moved_unit(output.scalar_type());
                  const Inputs parts(inputs);
                  Output own(output);
                  const std::vector<int64_t> counts(group.world(),
                                                    output.numel() * unit.per_element);
                  tpkernels::scatter(group, parts.pointers, own.data(), counts, unit.type, root,
                                     call_options(output, limit));
                  own.store();
                });
}

WorkPtr TpshmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_sizes,
                                    std::vector<int64_t>& input_sizes,
                                    const c10d::AllToAllOptions& opts) {
  if (!is_dense(output) || !is_dense(input)) {
    return rest().alltoall_base(output, input, output_sizes, input_sizes, opts);
  }
  check_same_type("all_to_all", output, input);
  const Tensors inputs = {input};
  return launch(
      {OpType::ALLTOALL_BASE, "tpshm:all_to_all", inputs, {{output}}, is_asynchronous(opts)},
      [output, input, sent_counts = counts_of_rows("input", input, input_sizes, size_),
       received_counts = counts_of_rows("output", output, output_sizes, size_),
       limit = time_limit(opts)](PeerGroup& group) {
        const ElementType type = moved_unit(input.scalar_type()).type;
        const Input sent(input);
        Output received(output);
        all_to_all(group, consecutive<const std::byte>(sent.data(), sent_counts, type), sent_counts,
                   consecutive<std::byte>(received.data(), received_counts, type), received_counts,
                   type, {{}, limit});
        received.store();
      });
}

WorkPtr TpshmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& opts) {
  check_count("all_to_all: outputs", outputs.size(), size_);
  check_count("all_to_all: inputs", inputs.size(), size_);
  if (!all_dense(outputs) || !all_dense(inputs)) return rest().alltoall(outputs, inputs, opts);
  for (const at::Tensor& tensor : outputs) check_same_type("all_to_all", tensor, inputs[0]);
  for (const at::Tensor& tensor : inputs) check_same_type("all_to_all", tensor, inputs[0]);
  return launch({OpType::ALLTOALL, "tpshm:all_to_all", inputs, {outputs}, is_asynchronous(opts)},
                [outputs, inputs, limit = time_limit(opts)](PeerGroup& group) {
                  const Inputs sent(inputs);
                  Outputs received(outputs);
                  all_to_all(group, sent.pointers, sent.counts, received.pointers, received.counts,
                             moved_unit(inputs[0].scalar_type()).type, {{}, limit});
                  received.store();
                });
}

WorkPtr TpshmBackend::barrier(const c10d::BarrierOptions& opts) {
  const Tensors none;
  return launch(
      {OpType::BARRIER, "tpshm:barrier", none, {}, is_asynchronous(opts)},
      [limit = time_limit(opts)](PeerGroup& group) { tpkernels::barrier(group, {{}, limit}); });
}

}  // namespace tpkernels
