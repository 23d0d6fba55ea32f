// all_reduce, and its half for one rank, reduce.
#include "comm/call.h"

namespace tpkernels {
namespace {

// What a reduction works on. Elements, but for `element`: the bytes of one.
struct Reducing {
  const void* in;
  void* out;
  int64_t count;
  int64_t element;
  ReduceFunction reduce;
};

// Every rank (or `root` alone) reads and reduces all that the others have:
//
//   step c: [in c -> slot][publish][wait for all][slots c and in c -> out c]
void one_shot(Operation& operation, const Reducing& r, int root, const StepSizes& sizes) {
  const int world = operation.world(), rank = operation.rank();
  const bool has_result = root < 0 || root == rank;
  const bool is_read = world > 1 && root != rank;
  const int64_t each = lines_down(sizes.slot) / r.element;
  SlotRing ring(operation, std::min(r.count, each) * r.element, sizes);
  ByRank<const void*> sources(world);
  int64_t step = 0;
  do {
    const Range range = range_of(r.count, each, step);
    const void* const own = bytes_at(r.in, range.begin * r.element);
    std::byte* const slot = ring.begin();
    if (is_read) ring.write(slot, own, range.size * r.element);
    operation.publish();
    if (step == 0 || has_result) operation.wait_all();
    if (!has_result) continue;
    for (int peer = 0; peer < world; ++peer) {
      sources[peer] = peer == rank ? own : ring.slot(peer);
    }
    r.reduce(sources.data(), world, bytes_at(r.out, range.begin * r.element), range.size);
  } while (++step * each < r.count);
}

// Rank r reduces part r of each chunk, the others take it from there. The halves of two chunks
// share a step, so that C chunks take C + 1:
//
//   slot in step c:  [for rank 0: in c, part 0][for rank 1: in c, part 1]...
//                     and in place of the own part the sum of the own part of chunk c - 1
//   after step c:    [sum of own part of chunk c -> out, next slot][in c + 1 -> next slot]
//                    [sums of chunk c - 1 -> out]
void two_shot(Operation& operation, const Reducing& r, const StepSizes& sizes) {
  const int world = operation.world(), rank = operation.rank();
  // Chunks of equal size, parts of whole lines.
  const int64_t most = lines_down(sizes.slot / world) * world / r.element;  // elements of a chunk
  const int64_t part =
      lines_up(divide_up(r.count, divide_up(r.count, most) * world) * r.element) / r.element;
  const int64_t chunks = divide_up(r.count, part * world), part_bytes = part * r.element;
  const auto range = [&](int64_t chunk, int of_rank) {
    return range_of(r.count, part, chunk * world + of_rank);
  };
  SlotRing ring(operation, part_bytes * world, sizes);
  const auto contribute = [&](int64_t chunk, std::byte* slot) {
    for (int peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      const Range theirs = range(chunk, peer);
      ring.write(slot + peer * part_bytes, bytes_at(r.in, theirs.begin * r.element),
                 theirs.size * r.element);
    }
  };

  ByRank<const std::byte*> slots(world);
  ByRank<const void*> sources(world);
  contribute(0, ring.begin());
  operation.publish();
  operation.wait_all();
  for (int64_t chunk = 0;; ++chunk) {
    for (int peer = 0; peer < world; ++peer) slots[peer] = ring.slot(peer);
    if (chunk < chunks) {
      std::byte* const next = ring.begin();  // does not wait: all have published the step before
      const Range own = range(chunk, rank);
      for (int peer = 0; peer < world; ++peer) {
        sources[peer] =
            peer == rank ? bytes_at(r.in, own.begin * r.element) : slots[peer] + rank * part_bytes;
      }
      std::byte* const sum = bytes_at(r.out, own.begin * r.element);
      r.reduce(sources.data(), world, sum, own.size);
      ring.write(next + rank * part_bytes, sum, own.size * r.element);
      if (chunk + 1 < chunks) contribute(chunk + 1, next);
    }
    for (int distance = 1; distance < world && chunk > 0; ++distance) {
      const int peer = (rank + distance) % world;
      const Range theirs = range(chunk - 1, peer);
      copy_bytes(bytes_at(r.out, theirs.begin * r.element), slots[peer] + peer * part_bytes,
                 theirs.size * r.element);
    }
    if (chunk == chunks) return;
    operation.publish();
    operation.wait_all();
  }
}

}  // namespace

void all_reduce(PeerGroup& group, const void* in, void* out, int64_t count, ElementType type,
                Reduction reduction, const CallOptions& options) {
  const Reducing reducing{in, out, count, bytes_of(type), reduce_function(type, reduction)};
  Operation operation(group,
                      signature_of(Collective::kAllReduce, type, reduction, -1, count, options),
                      options.timeout);
  const int world = group.world();
  // Between 2 ranks both ways move as many bytes, and one shot takes fewer steps. Half types are
  // bound by their conversions, of which two shots leave each rank half: 524,288 fp16 in 64 us
  // instead of 73, bf16 in 57 instead of 59 (measured as StepSizes).
  const bool is_half = type == ElementType::kBFloat16 || type == ElementType::kFloat16;
  const bool is_small = (world - 1) * count * reducing.element <= options.sizes.one_shot;
  if (is_small || world == 1 || (world == 2 && !is_half)) {
    one_shot(operation, reducing, -1, options.sizes);
  } else {
    two_shot(operation, reducing, options.sizes);
  }
  operation.finish();
}

void reduce(PeerGroup& group, const void* in, void* out, int64_t count, ElementType type,
            Reduction reduction, int root, const CallOptions& options) {
  check_root(group, root);
  const Reducing reducing{in, out, count, bytes_of(type), reduce_function(type, reduction)};
  Operation operation(group,
                      signature_of(Collective::kReduce, type, reduction, root, count, options),
                      options.timeout);
  one_shot(operation, reducing, root, options.sizes);
  operation.finish();
}

}  // namespace tpkernels
