#include <string>

#include "comm/call.h"

namespace tpkernels {
namespace {

// Who sends how many bytes to whom, known to every rank after the first step.
class Plan {
 public:
  explicit Plan(int world) : world_(world), bytes_(static_cast<size_t>(world) * world) {}

  int64_t& bytes(int from, int to) { return bytes_[static_cast<size_t>(from) * world_ + to]; }
  int64_t longest() const { return *std::max_element(bytes_.begin(), bytes_.end()); }

 private:
  int world_;
  std::vector<int64_t> bytes_;
};

// A slot in the first step begins with what its rank sends to and what it wants from each.
constexpr int64_t header_bytes(int world) {
  return lines_up(2 * world * static_cast<int64_t>(sizeof(int64_t)));
}

int64_t number_at(const std::byte* header, int64_t index) {
  int64_t number;
  std::memcpy(&number, header + index * static_cast<int64_t>(sizeof number), sizeof number);
  return number;
}

// All ranks compare all pairs, so that all find the same.
void compare(Operation& operation, const SlotRing& ring) {
  const int world = operation.world();
  for (int from = 0; from < world; ++from) {
    for (int to = 0; to < world; ++to) {
      const int64_t sent = number_at(ring.slot(from), to);
      const int64_t wanted = number_at(ring.slot(to), world + from);
      if (sent == wanted) continue;
      operation.fail("rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                     " elements to rank " + std::to_string(to) + ", which wants " +
                     std::to_string(wanted) +
                     " (ranks in the group). Fix: let the output sizes of each rank be what the "
                     "others' input sizes say");
    }
  }
}

}  // namespace

// Step s: [range s of what goes to every other rank -> slot][publish][wait for all]
//         [own places in the slots -> received]
void all_to_all(PeerGroup& group, std::span<const void* const> sent,
                std::span<const int64_t> send_counts, std::span<void* const> received,
                std::span<const int64_t> receive_counts, ElementType type,
                const CallOptions& options) {
  check_size(group, "sent", sent.size());
  check_size(group, "send_counts", send_counts.size());
  check_size(group, "received", received.size());
  check_size(group, "receive_counts", receive_counts.size());
  const int world = group.world(), rank = group.rank();
  const int64_t element = bytes_of(type), header = header_bytes(world);
  const int64_t each = lines_down(options.sizes.slot / world);

  Signature signature;  // the counts are no rank's but a pair's: see compare
  signature.collective = Collective::kAllToAll;
  signature.type = type;
  for (const int64_t size : options.shape) signature.add_dim(size);
  Operation operation(group, signature, options.timeout);
  SlotRing ring(operation, header + each * world, options.sizes);
  Plan plan(world);
  for (int peer = 0; peer < world; ++peer) plan.bytes(rank, peer) = send_counts[peer] * element;
  // The ranges of a slot follow each other, each from a line on; the own one is left out.
  const auto range = [&](int from, int to, int64_t step) {
    return range_of(plan.bytes(from, to), each, step);
  };
  const auto offset = [&](int from, int to, int64_t step) {
    int64_t sum = step == 0 ? header : 0;
    for (int peer = 0; peer < to; ++peer) {
      if (peer != from) sum += lines_up(range(from, peer, step).size);
    }
    return sum;
  };

  int64_t step = 0;
  do {
    std::byte* const slot = ring.begin();
    if (step == 0) {
      for (int peer = 0; peer < world; ++peer) {
        const int64_t numbers[2] = {send_counts[peer], receive_counts[peer]};
        std::memcpy(slot + peer * sizeof(int64_t), &numbers[0], sizeof(int64_t));
        std::memcpy(slot + (world + peer) * sizeof(int64_t), &numbers[1], sizeof(int64_t));
      }
    }
    for (int peer = 0; peer < world; ++peer) {
      const Range theirs = range(rank, peer, step);
      std::byte* const target =
          peer == rank ? bytes_at(received[rank], theirs.begin) : slot + offset(rank, peer, step);
      if (peer != rank) ring.write(target, bytes_at(sent[peer], theirs.begin), theirs.size);
    }
    operation.publish();
    operation.wait_all();
    if (step == 0) {
      compare(operation, ring);
      for (int from = 0; from < world; ++from) {
        for (int to = 0; to < world; ++to) {
          plan.bytes(from, to) = number_at(ring.slot(from), to) * element;
        }
      }
      copy_bytes(received[rank], sent[rank], plan.bytes(rank, rank));
    }
    for (int distance = 1; distance < world; ++distance) {
      const int peer = (rank + distance) % world;
      const Range mine = range(peer, rank, step);
      copy_bytes(bytes_at(received[peer], mine.begin), ring.slot(peer) + offset(peer, rank, step),
                 mine.size);
    }
  } while (++step * each < plan.longest());
  operation.finish();
}

}  // namespace tpkernels
