// Collectives over a peer group, on raw pointers. They return when this rank's part is done: its
// inputs may be written, its outputs read. All ranks of the group call the same ones in the same
// order; what must agree is compared between them first, and a difference raises PeerError on all.
//
// Reductions accumulate in rank order, half types in fp32, and round once: every rank holds the
// same bits, whatever algorithm the size chooses. Equivalent to torch.distributed's functions of
// the same names. Nothing is required of alignment; counts may be 0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "runtime/peer_group.h"

namespace tpkernels {

// How much goes through a slot at once, in bytes. The same on all ranks. Results do not depend on
// it. Measured with 2 processes pinned to 2 cores of an AMD EPYC (Zen 4, 1 MiB of second-level
// cache a core, November 2026), sizes interleaved, medians.
struct StepSizes {
  // all_reduce: while a rank reads no more than this from the others, it reduces everything itself
  // (of 2 ranks always, but for half types). 4 ranks on the 2 cores: 31 us against 37 at 192 KiB,
  // 74 against 56 at 768 KiB; with a core for each, a step costs less and the border is lower.
  int64_t one_shot = 128 << 10;
  // More goes in several steps. 128 to 512 KiB are as fast as each other at 2 and 8 MiB; 64 KiB is
  // up to a tenth slower at 2 MiB.
  int64_t slot = 256 << 10;
  // Steps from `ring_from` on go round in this much of a slot (see SlotRing): all_reduce of 65,536
  // fp32 in 19 us instead of 40, of 524,288 (in two shots) 139 instead of 286. Below 16 KiB there
  // is no difference.
  int64_t ring = 1 << 20;
  int64_t ring_from = 16 << 10;
};

// What a call stands for where it is not what it is called: for the comparison between ranks.
struct Purpose {
  Collective collective;
  Reduction reduction = Reduction::kNone;
  int root = -1;
};

// What is the same for every call. `shape`: of the tensor, to be compared between ranks; without it
// its number of elements is compared.
struct CallOptions {
  std::span<const int64_t> shape = {};
  std::optional<Seconds> timeout = std::nullopt;
  StepSizes sizes = {};
  std::optional<Purpose> purpose = std::nullopt;
};

void barrier(PeerGroup& group, const CallOptions& options = {});

// out [count] = reduction over ranks of in [count]. out may be in, and must not overlap it
// otherwise.
void all_reduce(PeerGroup& group, const void* in, void* out, int64_t count, ElementType type,
                Reduction reduction, const CallOptions& options = {});

// As all_reduce, but only rank `root` of the group has the result; out of the others is not
// written.
void reduce(PeerGroup& group, const void* in, void* out, int64_t count, ElementType type,
            Reduction reduction, int root, const CallOptions& options = {});

// out [counts[rank]] = reduction over ranks of their parts[rank], where rank is the caller's and
// parts[r] is [counts[r]]. out may be parts[rank].
void reduce_scatter(PeerGroup& group, std::span<const void* const> parts, void* out,
                    std::span<const int64_t> counts, ElementType type, Reduction reduction,
                    const CallOptions& options = {});

// data [count] of every rank becomes rank `root`'s.
void broadcast(PeerGroup& group, void* data, int64_t count, ElementType type, int root,
               const CallOptions& options = {});

// parts[r] [counts[r]] = rank r's own [counts[r]]. own may be parts[rank].
void all_gather(PeerGroup& group, const void* own, std::span<void* const> parts,
                std::span<const int64_t> counts, ElementType type, const CallOptions& options = {});

// On rank `root`, parts[r] = rank r's own; parts is not looked at on the others.
void gather(PeerGroup& group, const void* own, std::span<void* const> parts,
            std::span<const int64_t> counts, ElementType type, int root,
            const CallOptions& options = {});

// out [counts[rank]] = rank `root`'s parts[rank]; parts is not looked at on the others.
void scatter(PeerGroup& group, std::span<const void* const> parts, void* out,
             std::span<const int64_t> counts, ElementType type, int root,
             const CallOptions& options = {});

// received[r] [receive_counts[r]] = what rank r has in its sent[rank]. No overlap of the two. A
// rank knows only its own counts: where what one sends is not what the other receives, both raise.
void all_to_all(PeerGroup& group, std::span<const void* const> sent,
                std::span<const int64_t> send_counts, std::span<void* const> received,
                std::span<const int64_t> receive_counts, ElementType type,
                const CallOptions& options = {});

// Whether the reductions know `type` and `reduction`: kAvg is not for kBool, and kByte is only
// moved.
bool can_reduce(ElementType type, Reduction reduction);

}  // namespace tpkernels
