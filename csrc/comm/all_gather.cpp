// Those that copy what one rank has to others: all_gather, gather, broadcast, scatter; and barrier.
#include "comm/call.h"

namespace tpkernels {
namespace {

int64_t longest_of(std::span<const int64_t> counts) {
  return *std::max_element(counts.begin(), counts.end());
}

// parts[r] of those who receive (all, or `root` alone) = rank r's own.
//
// Step s: [range s of own -> slot][publish][wait for all][slots -> parts]
void gather_steps(Operation& operation, const void* own, std::span<void* const> parts,
                  std::span<const int64_t> counts, int64_t element, int root,
                  const StepSizes& sizes) {
  const int world = operation.world(), rank = operation.rank();
  const bool receives = root < 0 || root == rank, is_read = world > 1 && root != rank;
  const int64_t each = lines_down(sizes.slot), longest = longest_of(counts) * element;
  SlotRing ring(operation, std::min(each, longest), sizes);
  if (receives) copy_bytes(parts[rank], own, counts[rank] * element);
  int64_t step = 0;
  do {
    const Range mine = range_of(counts[rank] * element, each, step);
    std::byte* const slot = ring.begin();
    if (is_read) ring.write(slot, bytes_at(own, mine.begin), mine.size);
    operation.publish();
    if (step == 0 || receives) operation.wait_all();
    for (int distance = 1; distance < world && receives; ++distance) {
      const int peer = (rank + distance) % world;
      const Range theirs = range_of(counts[peer] * element, each, step);
      copy_bytes(bytes_at(parts[peer], theirs.begin), ring.slot(peer), theirs.size);
    }
  } while (++step * each < longest);
}

}  // namespace

void barrier(PeerGroup& group, const CallOptions& options) {
  Signature signature;
  signature.collective = Collective::kBarrier;
  Operation operation(group, signature, options.timeout);
  operation.begin(0);
  operation.publish();
  operation.wait_all();
  operation.finish();
}

void all_gather(PeerGroup& group, const void* own, std::span<void* const> parts,
                std::span<const int64_t> counts, ElementType type, const CallOptions& options) {
  check_size(group, "parts", parts.size());
  check_size(group, "counts", counts.size());
  Operation operation(
      group, signature_of(Collective::kAllGather, type, Reduction::kNone, -1, counts, options),
      options.timeout);
  gather_steps(operation, own, parts, counts, bytes_of(type), -1, options.sizes);
  operation.finish();
}

void gather(PeerGroup& group, const void* own, std::span<void* const> parts,
            std::span<const int64_t> counts, ElementType type, int root,
            const CallOptions& options) {
  check_root(group, root);
  if (root == group.rank()) check_size(group, "parts", parts.size());
  check_size(group, "counts", counts.size());
  Operation operation(
      group, signature_of(Collective::kGather, type, Reduction::kNone, root, counts, options),
      options.timeout);
  gather_steps(operation, own, parts, counts, bytes_of(type), root, options.sizes);
  operation.finish();
}

// Step s: root [range s -> slot][publish], others [publish][wait for root][slot -> data]
void broadcast(PeerGroup& group, void* data, int64_t count, ElementType type, int root,
               const CallOptions& options) {
  check_root(group, root);
  const bool is_root = root == group.rank();
  const int64_t each = lines_down(options.sizes.slot), bytes = count * bytes_of(type);
  Operation operation(
      group, signature_of(Collective::kBroadcast, type, Reduction::kNone, root, count, options),
      options.timeout);
  SlotRing ring(operation, std::min(each, bytes), options.sizes);
  int64_t step = 0;
  do {
    const Range range = range_of(bytes, each, step);
    std::byte* const slot = ring.begin();
    if (is_root && group.world() > 1) ring.write(slot, bytes_at(data, range.begin), range.size);
    operation.publish();
    if (step == 0) {
      operation.wait_all();
    } else {
      operation.wait(root);
    }
    if (!is_root) copy_bytes(bytes_at(data, range.begin), ring.slot(root), range.size);
  } while (++step * each < bytes);
  operation.finish();
}

// Step s: root [range s of every other rank's part -> slot][publish],
//         others [publish][wait for root][slot -> out]
void scatter(PeerGroup& group, std::span<const void* const> parts, void* out,
             std::span<const int64_t> counts, ElementType type, int root,
             const CallOptions& options) {
  check_root(group, root);
  const int world = group.world(), rank = group.rank();
  const bool is_root = root == rank;
  if (is_root) check_size(group, "parts", parts.size());
  check_size(group, "counts", counts.size());
  const int64_t element = bytes_of(type), longest = longest_of(counts) * element;
  const int64_t each = std::min(lines_down(options.sizes.slot / world), lines_up(longest));
  Operation operation(
      group, signature_of(Collective::kScatter, type, Reduction::kNone, root, counts, options),
      options.timeout);
  SlotRing ring(operation, each * world, options.sizes);
  int64_t step = 0;
  do {
    std::byte* const slot = ring.begin();
    for (int peer = 0; peer < world && is_root; ++peer) {
      const Range theirs = range_of(counts[peer] * element, each, step);
      const std::byte* const part = bytes_at(parts[peer], theirs.begin);
      if (peer != rank) ring.write(slot + peer * each, part, theirs.size);
    }
    operation.publish();
    if (step == 0) {
      operation.wait_all();
    } else {
      operation.wait(root);
    }
    const Range own = range_of(counts[rank] * element, each, step);
    if (!is_root) copy_bytes(bytes_at(out, own.begin), ring.slot(root) + rank * each, own.size);
  } while (++step * each < longest);
  // Last: out may be another rank's part.
  if (is_root) copy_bytes(out, parts[rank], counts[rank] * element);
  operation.finish();
}

}  // namespace tpkernels
