// allreduce, reduce and reduce_scatter of the tpshm backend.
#include <numeric>
#include <utility>

#include "c10d/call_options.h"
#include "c10d/tensor_buffers.h"
#include "c10d/tpshm_backend.h"

namespace tpkernels {
namespace {

using c10d::OpType;
using WorkPtr = TpshmBackend::WorkPtr;

// How a tensor is reduced here.
struct Reducible {
  at::Tensor tensor;  // of reals: a view of the complex one
  ElementType type;
  Reduction reduction;           // kNone: folded
  c10d::ReduceOp::RedOpType op;  // as given
};

// Rare reductions: all tensors are gathered, and folded in rank order.
bool can_fold(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::PRODUCT:
      return !tensor.is_complex() && reduced_type(tensor.scalar_type()) != ElementType::kNone;
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
      return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
    default:
      return false;
  }
}

// As the ranks compare it: not the all-gather that it is done by.
Reduction folded_reduction(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case c10d::ReduceOp::BAND:
      return Reduction::kBand;
    case c10d::ReduceOp::BOR:
      return Reduction::kBor;
    default:
      return Reduction::kBxor;
  }
}

at::Tensor fold(PeerGroup& group, const Reducible& given, std::optional<Seconds> limit,
                Collective collective, int root = -1) {
  const Unit unit = moved_unit(given.tensor.scalar_type());
  const int64_t count = given.tensor.numel() * unit.per_element;
  const Input own(given.tensor);
  std::vector<at::Tensor> tensors;
  std::vector<void*> parts;
  for (int rank = 0; rank < group.world(); ++rank) {
    tensors.push_back(at::empty(given.tensor.sizes(), given.tensor.options()));
    parts.push_back(tensors.back().data_ptr());
  }
  const std::vector<int64_t> counts(group.world(), count);
  CallOptions options = call_options(given.tensor, limit);
  options.purpose = Purpose{collective, folded_reduction(given.op), root};
  all_gather(group, own.data(), parts, counts, unit.type, options);
  at::Tensor& result = tensors[0];
  for (int rank = 1; rank < group.world(); ++rank) {
    switch (given.op) {
      case c10d::ReduceOp::PRODUCT:
        result.mul_(tensors[rank]);
        break;
      case c10d::ReduceOp::BAND:
        result.bitwise_and_(tensors[rank]);
        break;
      case c10d::ReduceOp::BOR:
        result.bitwise_or_(tensors[rank]);
        break;
      default:
        result.bitwise_xor_(tensors[rank]);
    }
  }
  return result;
}

std::optional<Reducible> reducible(const at::Tensor& tensor, const c10d::ReduceOp& operation) {
  if (!is_dense(tensor)) return std::nullopt;
  const std::optional<Reduction> reduction = reduction_of(operation);
  if (!reduction) {
    if (!can_fold(tensor, operation)) return std::nullopt;
    return Reducible{tensor, ElementType::kNone, Reduction::kNone, operation};
  }
  at::Tensor real = tensor;
  if (tensor.is_complex()) {
    const bool by_parts = *reduction == Reduction::kSum || *reduction == Reduction::kAvg;
    if (!by_parts || tensor.is_conj()) return std::nullopt;
    real = at::view_as_real(tensor);
  }
  const ElementType type = reduced_type(real.scalar_type());
  if (type == ElementType::kNone || !can_reduce(type, *reduction)) return std::nullopt;
  return Reducible{std::move(real), type, *reduction, operation};
}

std::optional<std::vector<Reducible>> all_reducible(const std::vector<at::Tensor>& tensors,
                                                    const c10d::ReduceOp& operation) {
  std::vector<Reducible> all;
  all.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    std::optional<Reducible> one = reducible(tensor, operation);
    if (!one) return std::nullopt;
    all.push_back(std::move(*one));
  }
  return all;
}

void all_reduce_in_place(PeerGroup& group, const Reducible& given, std::optional<Seconds> limit) {
  if (given.reduction == Reduction::kNone) {
    write_back(given.tensor, fold(group, given, limit, Collective::kAllReduce));
    return;
  }
  Output output(given.tensor);
  output.load();
  all_reduce(group, output.data(), output.data(), given.tensor.numel(), given.type, given.reduction,
             call_options(given.tensor, limit));
  output.store();
}

// `input` [R * n], of which this rank gets its part, summed, in `output` [n].
void reduce_scatter_single(PeerGroup& group, const at::Tensor& output, const Reducible& given,
                           std::optional<Seconds> limit) {
  const int world = group.world();
  const int64_t count = given.tensor.numel() / world;
  if (given.reduction == Reduction::kNone) {
    const at::Tensor whole = fold(group, given, limit, Collective::kReduceScatter).view(-1);
    output.copy_(whole.narrow(0, group.rank() * count, count).view(output.sizes()));
    return;
  }
  const Input input(given.tensor);
  Output kept(output.is_complex() ? at::view_as_real(output) : output);
  std::vector<const void*> parts(world);
  for (int rank = 0; rank < world; ++rank) {
    parts[rank] = static_cast<const std::byte*>(input.data()) + rank * count * bytes_of(given.type);
  }
  const std::vector<int64_t> counts(world, count);
  reduce_scatter(group, parts, kept.data(), counts, given.type, given.reduction,
                 call_options(given.tensor, limit));
  kept.store();
}

void check_single(const at::Tensor& output, const at::Tensor& input, int world) {
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "tpshm: reduce_scatter of ",
                    input.scalar_type(), " into ", output.scalar_type(),
                    ". Fix: give both the same dtype");
  TORCH_CHECK_VALUE(
      output.numel() * world == input.numel(), "tpshm: reduce_scatter of a tensor of ",
      input.sizes(), " into one of ", output.sizes(), ": allowed is an input of ", world,
      " (ranks) times as many elements. Fix: make the output of numel / world size elements");
}

bool known_single(const at::Tensor& output, const at::Tensor& input,
                  const c10d::ReduceOp& operation) {
  return is_dense(output) && !output.is_conj() && reducible(input, operation).has_value();
}

}  // namespace

WorkPtr TpshmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  std::optional<Reducible> given;
  if (tensors.size() == 1) given = reducible(tensors[0], opts.reduceOp);
  if (!given) return rest().allreduce(tensors, opts);
  return launch({OpType::ALLREDUCE, "tpshm:all_reduce", tensors, {tensors}, is_asynchronous(opts)},
                [given = std::move(*given), limit = time_limit(opts)](PeerGroup& group) {
                  all_reduce_in_place(group, given, limit);
                });
}

WorkPtr TpshmBackend::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) {
  std::optional<std::vector<Reducible>> given = all_reducible(tensors, opts.reduceOp);
  if (!given) return rest().allreduce_coalesced(tensors, opts);
  return launch(
      {OpType::ALLREDUCE_COALESCED, "tpshm:all_reduce", tensors, {tensors}, is_asynchronous(opts)},
      [given = std::move(*given), limit = time_limit(opts)](PeerGroup& group) {
        for (const Reducible& each : given) all_reduce_in_place(group, each, limit);
      });
}

WorkPtr TpshmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  std::optional<Reducible> given;
  if (tensors.size() == 1 && opts.rootTensor == 0) given = reducible(tensors[0], opts.reduceOp);
  if (!given) return rest().reduce(tensors, opts);
  const int root = static_cast<int>(opts.rootRank);
  check_root("reduce", root);
  return launch({OpType::REDUCE, "tpshm:reduce", tensors, {tensors}, is_asynchronous(opts)},
                [given = std::move(*given), root, limit = time_limit(opts)](PeerGroup& group) {
                  if (given.reduction == Reduction::kNone) {
                    const at::Tensor folded = fold(group, given, limit, Collective::kReduce, root);
                    if (group.rank() == root) given.tensor.copy_(folded);
                    return;
                  }
                  Output output(given.tensor);
                  output.load();
                  tpkernels::reduce(group, output.data(), output.data(), given.tensor.numel(),
                                    given.type, given.reduction, root,
                                    call_options(given.tensor, limit));
                  if (group.rank() == root) output.store();
                });
}

WorkPtr TpshmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  std::optional<std::vector<Reducible>> given;
  if (outputs.size() == 1 && inputs.size() == 1 && is_dense(outputs[0]) && !outputs[0].is_conj()) {
    given = all_reducible(inputs[0], opts.reduceOp);
  }
  if (!given) return rest().reduce_scatter(outputs, inputs, opts);
  TORCH_CHECK_VALUE(inputs[0].size() == static_cast<size_t>(size_), "tpshm: reduce_scatter of ",
                    inputs[0].size(), " tensors; allowed is one for each of ", size_, " ranks");
  const at::Tensor& output = outputs[0];
  for (const at::Tensor& input : inputs[0]) {
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "tpshm: reduce_scatter of ",
                      input.scalar_type(), " into ", output.scalar_type(),
                      ". Fix: give all the same dtype");
  }
  TORCH_CHECK_VALUE(output.numel() == inputs[0][rank_].numel(), "tpshm: reduce_scatter of ",
                    inputs[0][rank_].sizes(), " into ", output.sizes(),
                    ". Fix: give the output the shape of this rank's input");
  return launch(
      {OpType::REDUCE_SCATTER, "tpshm:reduce_scatter", inputs[0], {outputs}, is_asynchronous(opts)},
      [given = std::move(*given), output, limit = time_limit(opts)](PeerGroup& group) {
        if (given[0].reduction == Reduction::kNone) {
          for (int rank = 0; rank < group.world(); ++rank) {
            const at::Tensor folded = fold(group, given[rank], limit, Collective::kReduceScatter);
            if (rank == group.rank()) output.copy_(folded.view(output.sizes()));
          }
          return;
        }
        std::vector<Input> held;
        std::vector<const void*> parts;
        std::vector<int64_t> counts;
        for (const Reducible& each : given) {
          held.emplace_back(each.tensor);
          parts.push_back(held.back().data());
          counts.push_back(each.tensor.numel());
        }
        Output kept(output.is_complex() ? at::view_as_real(output) : output);
        tpkernels::reduce_scatter(group, parts, kept.data(), counts, given[0].type,
                                  given[0].reduction, {{}, limit});
        kept.store();
      });
}

WorkPtr TpshmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  if (!known_single(output, input, opts.reduceOp)) {
    return rest()._reduce_scatter_base(output, input, opts);
  }
  check_single(output, input, size_);
  const Tensors inputs = {input};
  return launch({OpType::_REDUCE_SCATTER_BASE,
                 "tpshm:reduce_scatter",
                 inputs,
                 {{output}},
                 is_asynchronous(opts)},
                [output, given = *reducible(input, opts.reduceOp), limit = time_limit(opts)](
                    PeerGroup& group) { reduce_scatter_single(group, output, given, limit); });
}

WorkPtr TpshmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "tpshm: reduce_scatter of ", inputs.size(),
                    " tensors into ", outputs.size(), ". Fix: give as many outputs as inputs");
  std::optional<std::vector<Reducible>> given = all_reducible(inputs, opts.reduceOp);
  for (const at::Tensor& output : outputs) {
    if (!is_dense(output) || output.is_conj()) given.reset();
  }
  if (!given) return rest().reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  for (size_t i = 0; i < inputs.size(); ++i) check_single(outputs[i], inputs[i], size_);
  return launch(
      {OpType::COALESCED, "tpshm:reduce_scatter", inputs, {outputs}, is_asynchronous(opts)},
      [outputs, given = std::move(*given), limit = time_limit(opts)](PeerGroup& group) {
        for (size_t i = 0; i < given.size(); ++i) {
          reduce_scatter_single(group, outputs[i], given[i], limit);
        }
      });
}

}  // namespace tpkernels
