#include "comm/call.h"

namespace tpkernels {

// Step s: [range s of every other rank's part -> slot][publish][wait for all]
//         [slots, own part -> out]
void reduce_scatter(PeerGroup& group, std::span<const void* const> parts, void* out,
                    std::span<const int64_t> counts, ElementType type, Reduction reduction,
                    const CallOptions& options) {
  check_size(group, "parts", parts.size());
  check_size(group, "counts", counts.size());
  const int world = group.world(), rank = group.rank();
  const int64_t element = bytes_of(type);
  const ReduceFunction reduce = reduce_function(type, reduction);
  const int64_t longest = *std::max_element(counts.begin(), counts.end());
  const int64_t each_bytes =
      std::min(lines_down(options.sizes.slot / world), lines_up(longest * element));
  const int64_t each = each_bytes / element;

  Operation operation(
      group, signature_of(Collective::kReduceScatter, type, reduction, -1, counts, options),
      options.timeout);
  SlotRing ring(operation, each_bytes * world, options.sizes);
  ByRank<const void*> sources(world);
  int64_t step = 0;
  do {
    std::byte* const slot = ring.begin();
    for (int peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      const Range theirs = range_of(counts[peer], each, step);
      ring.write(slot + peer * each_bytes, bytes_at(parts[peer], theirs.begin * element),
                 theirs.size * element);
    }
    operation.publish();
    operation.wait_all();
    const Range own = range_of(counts[rank], each, step);
    for (int peer = 0; peer < world; ++peer) {
      sources[peer] = peer == rank ? bytes_at(parts[rank], own.begin * element)
                                   : ring.slot(peer) + rank * each_bytes;
    }
    reduce(sources.data(), world, bytes_at(out, own.begin * element), own.size);
  } while (++step * each < longest);
  operation.finish();
}

}  // namespace tpkernels
