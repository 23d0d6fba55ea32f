// Every collective, bit for bit against one element at a time: worlds, types, reductions, counts
// around every threshold and border of a chunk, any alignment, in place; what ranks must agree on.
#include "comm/collectives.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/collective_call.h"
#include "tests/ranks.h"

namespace tpkernels {
namespace {

using testing::Call;
using testing::in_processes;
using testing::mixed;
using testing::on_threads;
using testing::verify;

// Few enough bytes that tests of a few hundred elements take several steps, and go round in a slot.
constexpr StepSizes kSmall = {.one_shot = 256, .slot = 1024, .ring = 4000, .ring_from = 500};
constexpr StepSizes kOneShot = {.one_shot = 1 << 20, .slot = 1024, .ring = 0, .ring_from = 0};
constexpr StepSizes kTwoShot = {.one_shot = 0, .slot = 1024, .ring = 10000, .ring_from = 0};

constexpr Collective kCollectives[] = {
    Collective::kBarrier,       Collective::kAllReduce, Collective::kReduce,
    Collective::kReduceScatter, Collective::kAllGather, Collective::kGather,
    Collective::kBroadcast,     Collective::kScatter,   Collective::kAllToAll};
constexpr ElementType kReducedTypes[] = {
    ElementType::kFloat64, ElementType::kFloat32, ElementType::kBFloat16, ElementType::kFloat16,
    ElementType::kInt64,   ElementType::kInt32,   ElementType::kInt16,    ElementType::kInt8,
    ElementType::kUInt8,   ElementType::kBool};
constexpr Reduction kReductions[] = {Reduction::kSum, Reduction::kAvg, Reduction::kMax,
                                     Reduction::kMin};
constexpr int kWorlds[] = {1, 2, 3, 4, 5};

// Every rank of every world makes the calls that calls(world, call) lists.
template <typename Calls>
void check_calls(Calls&& calls) {
  for (const int world : kWorlds) {
    const auto errors = on_threads(world, Seconds(60), [&](PeerGroup& group) {
      calls(world, [&](const Call& call) { verify(group, call); });
    });
    for (const std::string& error : errors) {
      CHECK(error.empty(), "world %d: %s", world, error.c_str());
    }
  }
}

TPK_TEST(all_reduce_of_every_type_and_reduction) {
  check_calls([](int world, auto&& make) {
    uint64_t seed = 0;
    for (const ElementType type : kReducedTypes) {
      for (const Reduction reduction : kReductions) {
        if (!can_reduce(type, reduction)) continue;
        for (const int64_t count : {0, 1, 7, 65, 300, 1025}) {
          ++seed;
          make(Call{.type = type,
                    .reduction = reduction,
                    .count = count,
                    .in_place = seed % 2 == 0,
                    .shift = static_cast<int>(seed % 3),
                    .seed = seed,
                    .sizes = kSmall});
        }
        make(Call{.collective = Collective::kReduceScatter,
                  .type = type,
                  .reduction = reduction,
                  .count = 100,
                  .uneven = true,
                  .in_place = seed % 2 == 0,
                  .seed = ++seed,
                  .sizes = kSmall});
        make(Call{.collective = Collective::kReduce,
                  .type = type,
                  .reduction = reduction,
                  .count = 300,
                  .in_place = seed % 2 == 0,
                  .root = static_cast<int>(seed % world),
                  .seed = ++seed,
                  .sizes = kSmall});
      }
    }
  });
}

// The bits of half types and fp32 sums do not depend on the way: each is checked against the order
// of the ranks.
TPK_TEST(all_reduce_around_the_borders_of_threshold_and_chunks) {
  check_calls([](int world, auto&& make) {
    uint64_t seed = 0;
    for (const auto& [type, element] :
         {std::pair(ElementType::kFloat32, 4), std::pair(ElementType::kBFloat16, 2)}) {
      const int64_t line = 64 / element;
      const int64_t chunk = 1024 / world / 64 * line * world;
      for (const int64_t border :
           {line, line * world, kSmall.one_shot / std::max(world - 1, 1) / element,
            kSmall.slot / element, chunk, chunk + line, 2 * chunk, 3 * chunk - line, 5 * chunk}) {
        for (const int64_t count : {border - 1, border, border + 1}) {
          for (const StepSizes& sizes : {kSmall, kOneShot, kTwoShot}) {
            ++seed;
            make(Call{.type = type,
                      .count = count,
                      .in_place = seed % 2 == 0,
                      .shift = static_cast<int>(seed % 4),
                      .seed = seed,
                      .sizes = sizes});
          }
        }
      }
    }
  });
}

TPK_TEST(every_other_collective_of_even_uneven_and_no_counts) {
  check_calls([](int world, auto&& make) {
    uint64_t seed = 0;
    for (const Collective collective : kCollectives) {
      if (collective == Collective::kAllReduce) continue;
      const bool reduces =
          collective == Collective::kReduce || collective == Collective::kReduceScatter;
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kBFloat16, ElementType::kInt64,
            reduces ? ElementType::kUInt8 : ElementType::kByte}) {
        const int64_t slot = kSmall.slot / bytes_of(type);
        for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{13}, slot / world,
                                    slot / world + 1, slot - 1, slot, slot + 1, 3 * slot + 5}) {
          for (const bool uneven : {false, true}) {
            ++seed;
            make(Call{.collective = collective,
                      .type = type,
                      .count = count,
                      .uneven = uneven,
                      .in_place = seed % 3 == 0,
                      .root = static_cast<int>(seed % world),
                      .shift = static_cast<int>(seed % 4),
                      .seed = seed,
                      .sizes = kSmall});
          }
        }
      }
    }
  });
}

TPK_TEST(default_step_sizes) {
  check_calls([](int world, auto&& make) {
    const StepSizes sizes;
    uint64_t seed = 0;
    for (const int64_t count : {sizes.one_shot / 2, sizes.one_shot / 2 + 1, sizes.slot / 2 + 1,
                                sizes.slot * 3 / 2 + 77}) {
      for (const Collective collective : kCollectives) {
        ++seed;
        make(Call{.collective = collective,
                  .type = ElementType::kBFloat16,
                  .count = collective == Collective::kAllReduce ? count : count / world + 1,
                  .uneven = seed % 2 == 0,
                  .in_place = seed % 3 == 0,
                  .root = static_cast<int>(seed % world),
                  .seed = seed});
      }
    }
  });
}

// What the same seed makes on every rank.
Call random_call(int world, uint64_t seed) {
  const auto pick = [&](int what, int64_t below) {
    return static_cast<int64_t>(mixed(seed, what) % static_cast<uint64_t>(below));
  };
  Call call;
  call.collective = kCollectives[pick(0, std::size(kCollectives))];
  call.type = kReducedTypes[pick(1, std::size(kReducedTypes))];
  do {
    call.reduction = kReductions[pick(2, std::size(kReductions))];
    ++seed;
  } while (!can_reduce(call.type, call.reduction));
  call.count = pick(3, 4) == 0 ? pick(4, 20) : pick(4, 1500);
  call.uneven = pick(5, 2);
  call.in_place = pick(6, 2);
  call.root = static_cast<int>(pick(7, world));
  call.shift = static_cast<int>(pick(8, 8));
  call.seed = seed;
  call.sizes = pick(9, 2) ? kSmall : kTwoShot;
  return call;
}

TPK_TEST(collectives_follow_each_other_in_any_order) {
  check_calls([](int world, auto&& make) {
    for (uint64_t seed = 0; seed < 300; ++seed) make(random_call(world, seed * 1000));
  });
}

TPK_TEST(collectives_between_processes) {
  for (const int world : {2, 3}) {
    const bool all_well = in_processes(world, Seconds(60), [&](PeerGroup& group) {
      for (uint64_t seed = 0; seed < 200; ++seed) {
        verify(group, random_call(world, 7 + seed * 1000));
      }
      verify(group, Call{.type = ElementType::kBFloat16, .count = 1'000'003, .in_place = true});
    });
    CHECK(all_well, "world %d", world);
  }
}

// calls(group) differs between ranks: every rank raises, with all of `words` in the message.
template <typename Calls>
void check_mismatch(int world, const std::vector<std::string>& words, Calls&& calls) {
  const auto errors = on_threads(world, Seconds(20), calls);
  for (const std::string& error : errors) {
    for (const std::string& word : words) {
      CHECK(error.find(word) != std::string::npos, "no \"%s\" in \"%s\"", word.c_str(),
            error.c_str());
    }
  }
}

TPK_TEST(calls_that_differ_raise_on_every_rank_and_name_both) {
  const auto odd = [](PeerGroup& group) { return group.rank() == 1; };
  const auto sum = [](PeerGroup& group, int64_t count, ElementType type, Reduction reduction,
                      const CallOptions& options = {}) {
    std::vector<char> data(1000);
    all_reduce(group, data.data(), data.data(), count, type, reduction, options);
  };
  check_mismatch(3, {"float32 [3]", "float32 [5]"}, [&](PeerGroup& group) {
    sum(group, odd(group) ? 5 : 3, ElementType::kFloat32, Reduction::kSum);
  });
  check_mismatch(2, {"float32 [3]", "int32 [3]"}, [&](PeerGroup& group) {
    sum(group, 3, odd(group) ? ElementType::kInt32 : ElementType::kFloat32, Reduction::kSum);
  });
  check_mismatch(2, {"all_reduce(sum)", "all_reduce(max)"}, [&](PeerGroup& group) {
    sum(group, 3, ElementType::kFloat32, odd(group) ? Reduction::kMax : Reduction::kSum);
  });
  check_mismatch(2, {"[2, 3]", "[3, 2]"}, [&](PeerGroup& group) {
    const std::vector<int64_t> shape =
        odd(group) ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{3, 2};
    sum(group, 6, ElementType::kFloat32, Reduction::kSum, {.shape = shape});
  });
  check_mismatch(3, {"broadcast", "rank 0 of the group", "rank 1 of the group"},
                 [&](PeerGroup& group) {
                   char data[4] = {};
                   broadcast(group, data, 4, ElementType::kByte, odd(group) ? 1 : 0);
                 });
  check_mismatch(2, {"barrier", "all_reduce"}, [&](PeerGroup& group) {
    odd(group) ? barrier(group) : sum(group, 3, ElementType::kFloat32, Reduction::kSum);
  });
  check_mismatch(2, {"all_gather", "bytes [4]", "#"}, [&](PeerGroup& group) {
    char own[4] = {}, all[8] = {};
    const std::vector<int64_t> counts =
        odd(group) ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{3, 1};
    all_gather(group, own, std::vector<void*>{all, all + 4}, counts, ElementType::kByte);
  });
  // Equal counts, but of another size than the shape says.
  check_mismatch(2, {"all_gather", "bytes [4]", "#"}, [&](PeerGroup& group) {
    char own[4] = {}, all[8] = {};
    const std::vector<int64_t> shape = {4}, counts(2, odd(group) ? 2 : 4);
    all_gather(group, own, std::vector<void*>{all, all + 4}, counts, ElementType::kByte,
               {.shape = shape});
  });
}

TPK_TEST(all_to_all_counts_that_differ_name_both_ranks_and_counts) {
  check_mismatch(3, {"rank 2 sends 4 elements to rank 1, which wants 3", "all_to_all", "Fix"},
                 [](PeerGroup& group) {
                   const int rank = group.rank();
                   char data[64] = {};
                   const std::vector<const void*> sent(3, data);
                   std::vector<void*> received = {data + 16, data + 32, data + 48};
                   std::vector<int64_t> counts(3, 4), wanted(3, 4);
                   if (rank == 1) wanted[2] = 3;
                   all_to_all(group, sent, counts, received, wanted, ElementType::kByte);
                 });
}

TPK_TEST(calls_that_make_no_sense_are_refused_before_anyone_waits) {
  const auto errors = on_threads(1, Seconds(5), [](PeerGroup& group) {
    const auto refused = [](auto&& call) {
      try {
        call();
      } catch (const std::invalid_argument& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    float data[2] = {1, 2};
    const std::string avg =
        refused([&] { all_reduce(group, data, data, 2, ElementType::kBool, Reduction::kAvg); });
    CHECK(avg.find("(avg) of bool") != std::string::npos, "%s", avg.c_str());
    const std::string bytes =
        refused([&] { all_reduce(group, data, data, 2, ElementType::kByte, Reduction::kSum); });
    CHECK(bytes.find("(sum) of bytes") != std::string::npos, "%s", bytes.c_str());
    const std::string root = refused([&] { broadcast(group, data, 2, ElementType::kFloat32, 1); });
    CHECK(root.find("root: 1; allowed") != std::string::npos, "%s", root.c_str());
    const std::string counts = refused([&] {
      all_gather(group, data, std::vector<void*>{data}, std::vector<int64_t>{1, 1},
                 ElementType::kFloat32);
    });
    CHECK(counts.find("counts: 2 for a group of 1") != std::string::npos, "%s", counts.c_str());
    barrier(group);  // and the group goes on
  });
  CHECK(errors[0].empty(), "%s", errors[0].c_str());
}

}  // namespace
}  // namespace tpkernels
