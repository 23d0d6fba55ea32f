// What befalls the processes of a peer group: forks, kills at every place, stops, limits that are
// too small. The others say so in time, and nothing is left behind.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/check.h"
#include "tests/group_calls.h"
#include "tests/processes.h"

namespace tpkernels::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;  // with UBSan, which opens descriptors of its own
#else
constexpr bool kAddressSanitizer = false;
#endif
#if defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // terabytes of addresses of its own
#else
constexpr bool kSanitized = kAddressSanitizer;
#endif

constexpr double kSoon = 5;  // seconds; far below the limit of these groups

void sleep_milliseconds(int count) {
  std::this_thread::sleep_for(std::chrono::milliseconds(count));
}

// Ends its process as a kill from outside would, without a destructor.
void die() { kill(getpid(), SIGKILL); }

// 0 if the next sum fails soon and says `text`.
int fails_soon(PeerGroup& group, const std::string& text) {
  const auto began = Clock::now();
  const std::string error = error_of_sum(group);
  if (says(error, text) && Seconds(Clock::now() - began).count() < kSoon) return 0;
  std::printf("rank %d: '%s'\n", group.rank(), error.c_str());
  std::fflush(stdout);
  return 2;
}

// Rank 1 of 3 sums once and is then killed by `end`; the others say so.
void check_killed(const char* what, const std::function<void(PeerGroup&, PeerMemory&)>& end,
                  const std::string& text) {
  const auto statuses = in_processes(3, [&](int rank, std::shared_ptr<PeerMemory> memory) {
    const Group group = group_of(memory, Seconds(60));
    sum(*group, 1);
    if (rank != 1) return fails_soon(*group, text);
    end(*group, *memory);
    return 4;
  });
  CHECK(WIFSIGNALED(statuses[1]), "%s: status %d", what, statuses[1]);
  for (const int rank : {0, 2}) {
    CHECK(statuses[rank] == 0, "%s: rank %d: status %d", what, rank, statuses[rank]);
  }
}

TPK_TEST(a_rank_killed_anywhere_is_named) {
  const auto in_step = [](PeerGroup& group, bool writes, bool publishes) {
    PeerGroup::Operation operation(group, signature_of(2));
    std::byte* const slot = operation.begin(1 << 20);
    if (writes) std::memset(slot, 1, 1 << 19);
    if (publishes) operation.publish();
    die();
  };
  const std::string gone = "rank 1 (process ";
  check_killed("before it writes", [&](auto& g, auto&) { in_step(g, false, false); }, gone);
  check_killed("while it writes", [&](auto& g, auto&) { in_step(g, true, false); }, gone);
  check_killed(
      "while it sleeps",
      [](PeerGroup& group, PeerMemory&) {
        std::thread([] {
          sleep_milliseconds(60);
          die();
        }).detach();
        PeerGroup::Operation operation(group, signature_of(2));
        PeerGroup::Operation::Signals{operation}.wait(0, 7);  // a step that never comes
      },
      gone);
  check_killed(
      "inside abort, before its reason is written",
      [](PeerGroup&, PeerMemory& memory) {
        memory.abort_record().state.store(AbortRecord::kWriting);
        die();
      },
      "a rank ended the group");
}

TPK_TEST(a_rank_killed_after_it_published_fails_the_next_operation_only) {
  const auto statuses = in_processes(2, [](int rank, std::shared_ptr<PeerMemory> memory) {
    const Group group = group_of(std::move(memory), Seconds(60));
    if (rank == 1) {
      PeerGroup::Operation operation(*group, signature_of(2));
      const int64_t value = 5;
      std::memcpy(operation.begin(sizeof value), &value, sizeof value);
      operation.publish();
      die();
    }
    sleep_milliseconds(100);
    if (sum(*group, 1) != 6) return 2;
    return fails_soon(*group, "is gone: its process has ended");
  });
  CHECK(statuses[0] == 0, "status %d", statuses[0]);
}

TPK_TEST(a_stopped_rank_is_late_and_not_gone) {
  // The pid of the one to stop, where both see it.
  auto* const stopped = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto children = start_processes(2, [&](int rank, std::shared_ptr<PeerMemory> memory) {
    const Group group = group_of(std::move(memory), Seconds(0.4));
    sum(*group, 1);
    if (rank == 1) {
      stopped->store(getpid());
      ::raise(SIGSTOP);
      return fails_soon(*group, "no arrival of rank 1 within 0.4 s");  // goes on when it is over
    }
    while (stopped->load() == 0) sleep_milliseconds(1);
    sleep_milliseconds(50);
    const int status = fails_soon(*group, "no arrival of rank 1 within 0.4 s");
    kill(stopped->load(), SIGCONT);
    return status;
  });
  for (const pid_t child : children) {
    const int status = status_of(child);
    CHECK(status == 0, "status %d", status);
  }
  munmap(stopped, 4096);
}

TPK_TEST(a_forked_child_is_no_rank_and_does_not_end_the_group) {
  const auto statuses = in_processes(2, [](int rank, std::shared_ptr<PeerMemory> memory) {
    Group group = group_of(memory, Seconds(20));
    // With a thread under way, which the child will not have.
    std::atomic<int64_t> submitted{0};
    group->queue().submit([&] { submitted = sum(*group, 1); });
    const pid_t child = in_child([&] {
      alarm(10);  // instead of a hang
      if (!says(error_of_sum(*group), "this process is a fork of rank")) return 2;
      group->abort("a child ends");
      group.reset();
      memory.reset();
      return 0;
    });
    const int status = status_of(child);
    if (status != 0) return 3;
    sum_often(*group, 50);  // neither ended nor gone
    if (submitted != 2) return 4;
    if (memory->gone(1 - rank)) return 5;
    sum(*group, 1);  // until here the other one is not gone
    return 0;
  });
  for (const int status : statuses) CHECK(status == 0, "status %d", status);
}

TPK_TEST(a_killed_rank_is_named_though_a_child_of_it_lives_on) {
  const auto began = Clock::now();
  check_killed(
      "with a child",
      [](PeerGroup&, PeerMemory&) {
        // It holds the descriptor and the mapping.
        if (fork() == 0) {
          sleep_milliseconds(1500);
          _exit(0);
        }
        die();
      },
      "is gone: its process has ended");
  const double seconds = Seconds(Clock::now() - began).count();
  CHECK(seconds < 1.4, "only after its child: %g s", seconds);
}

// Whether memory of two ranks cannot be had under a limit of `bytes_or_files`, with an error that
// says `text`, and without a descriptor lost.
int refused_under(int resource, rlim_t bytes_or_files, const std::string& text) {
  const int before = open_descriptors();
  const rlimit limit = {bytes_or_files, bytes_or_files};
  if (setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return 2;
  try {
    PeerMemory::create(0, 2);
    return 3;
  } catch (const PeerError& error) {
    if (!says(error.what(), text) || !says(error.what(), "Fix: ")) {
      std::printf("'%s' without '%s'\n", error.what(), text.c_str());
      std::fflush(stdout);
      return 4;
    }
  }
  if (resource == RLIMIT_NOFILE) return 0;  // nothing could be counted
  return open_descriptors() == before ? 0 : 5;
}

TPK_TEST(limits_that_are_too_small_are_named) {
  struct Limit {
    int resource;
    rlim_t value;
    const char* text;
  };
  for (const Limit& limit :
       {Limit{RLIMIT_FSIZE, 1 << 20, "ulimit -f"}, Limit{RLIMIT_AS, rlim_t{100} << 20, "ulimit -v"},
        Limit{RLIMIT_NOFILE, 3, "memfd_create failed: Too many open files"}}) {
    if (kSanitized && limit.resource == RLIMIT_AS) continue;
    const int status =
        status_of(in_child([&] { return refused_under(limit.resource, limit.value, limit.text); }));
    CHECK(status == 0, "%s: status %d", limit.text, status);
  }
}

TPK_TEST(a_rank_without_descriptors_to_spare_says_so) {
  if (kAddressSanitizer) return;
  DescriptorOffer offer;
  const pid_t maker = in_child([&] {
    auto memory = PeerMemory::create(0, 2);
    // The one it accepts would be the first beyond the limit.
    const rlim_t used = static_cast<rlim_t>(memory->descriptor()) + 1;
    const rlimit limit = {used, used};
    setrlimit(RLIMIT_NOFILE, &limit);
    alarm(10);
    try {
      offer.serve(memory->descriptor(), 1, Seconds(60));
    } catch (const PeerError& error) {
      return says(error.what(), "cannot accept rank 1 of 1: Too many open files") ? 0 : 2;
    }
    return 3;
  });
  const pid_t taker = in_child([&] {
    try {
      take_descriptor(offer.address(), Seconds(20));
    } catch (const PeerError&) {
      return 0;
    }
    return 2;
  });
  CHECK(status_of(maker) == 0, "it has not said so");
  kill(taker, SIGKILL);  // it waits for its turn: this process listens too
  status_of(taker);
}

TPK_TEST(a_taker_without_descriptors_to_spare_says_so) {
  DescriptorOffer offer;
  const pid_t taker = in_child([&] {
    const rlim_t used = static_cast<rlim_t>(dup(0)) + 1;  // the socket is the last
    close(static_cast<int>(used) - 1);
    const rlimit limit = {used, used};
    setrlimit(RLIMIT_NOFILE, &limit);
    try {
      take_descriptor(offer.address(), Seconds(20));
    } catch (const PeerError& error) {
      if (says(error.what(), "ulimit -n")) return 0;
      std::printf("%s\n", error.what());
      std::fflush(stdout);
    }
    return 2;
  });
  offer.serve(0, 1, Seconds(20));
  const int status = status_of(taker);
  CHECK(status == 0, "status %d", status);
}

TPK_TEST(an_offer_that_nobody_takes_ends_in_time) {
  const int before = open_descriptors();
  const auto began = Clock::now();
  std::string error;
  try {
    DescriptorOffer().serve(0, 2, Seconds(0.1));
  } catch (const PeerError& caught) {
    error = caught.what();
  }
  CHECK(says(error, "0 of 2 ranks came"), "%s", error.c_str());
  CHECK(Seconds(Clock::now() - began).count() < kSoon, "late");
  CHECK(open_descriptors() == before, "%d descriptors, then %d", before, open_descriptors());
}

TPK_TEST(nothing_is_left_behind) {
  const auto files = [] {
    return count_entries("/tmp", "tpkernels") + count_entries("/dev/shm", "tpkernels");
  };
  const int before = files();
  const auto statuses = in_processes(3, [](int rank, std::shared_ptr<PeerMemory> memory) {
    // Its own descriptor is open by now, and no other.
    const int before = open_descriptors();
    {
      const Group group = group_of(std::move(memory), Seconds(20));
      sum(*group, 1);
      if (rank == 1) die();
      if (const int status = fails_soon(*group, "rank 1")) return status;
    }
    return open_descriptors() == before - 1 ? 0 : 3;
  });
  for (const int rank : {0, 2}) CHECK(statuses[rank] == 0, "status %d", statuses[rank]);
  CHECK(files() == before, "a file in /tmp or /dev/shm");
}

}  // namespace
}  // namespace tpkernels::testing
