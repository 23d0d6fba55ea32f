#include "c10d/tpshm_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <thread>
#include <utility>

#include "c10d/tpshm_work.h"
#include "runtime/peer_groups.h"

namespace tpkernels {
namespace {

// How long a backend that goes lets its queue end in good order. ASSUMPTION: what all ranks have
// begun is done by then; what some have not begun would not end by waiting.
constexpr Seconds kGrace{2.0};
constexpr std::chrono::microseconds kPoll{100};

Seconds seconds(std::chrono::milliseconds time) {
  return std::chrono::duration_cast<Seconds>(time);
}

bool becomes_idle(ProgressQueue& queue) {
  if (queue.on_own_thread()) return false;
  const Clock::time_point began = Clock::now();
  while (!queue.idle()) {
    if (Clock::now() - began > kGrace) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

// The exception in progress, as PyTorch's.
std::exception_ptr backend_error() {
  try {
    throw;
  } catch (const PeerError& error) {
    try {
      C10_THROW_ERROR(DistBackendError, std::string("tpshm: ") + error.what());
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return std::current_exception();
  }
}

// One after the other on a thread of their own; beside it where that one is busy, perhaps waiting
// for what comes next.
void on_completion_thread(const std::shared_ptr<ProgressQueue>& completions,
                          std::function<void()> work) {
  if (completions->idle()) {
    completions->submit([completions, work = std::move(work)] { work(); });
  } else {
    std::thread(std::move(work)).detach();
  }
}

void carry_out(TpshmWork& work, PeerGroup& group, const std::function<void(PeerGroup&)>& body,
               const std::shared_ptr<ProgressQueue>& completions) {
  std::exception_ptr error;
  try {
    // Gradients and versions of tensors are no matter of a collective.
    const at::AutoDispatchBelowADInplaceOrView below;
    body(group);
  } catch (...) {
    error = backend_error();
  }
  work.complete(error, [&](std::function<void()> rest) {
    on_completion_thread(completions, std::move(rest));
  });
}

}  // namespace

TpshmBackend::TpshmBackend(std::shared_ptr<PeerGroup> group, c10::intrusive_ptr<c10d::Backend> rest,
                           std::string name, std::vector<uint64_t> global_ranks)
    : c10d::Backend(group->rank(), group->world()),
      group_(std::move(group)),
      rest_(std::move(rest)),
      name_(std::move(name)),
      options_(c10::make_intrusive<Options>(
          "tpshm", std::chrono::duration_cast<std::chrono::milliseconds>(group_->timeout()))) {
  options_->group_name = name_;
  options_->global_ranks_in_group = std::move(global_ranks);
  register_peer_group(name_, group_);
}

TpshmBackend::~TpshmBackend() { leave(); }

void TpshmBackend::leave() {
  std::shared_ptr<PeerGroup> group;
  {
    std::lock_guard lock(mutex_);
    group.swap(group_);
  }
  if (!group) return;
  forget_peer_group(name_, group.get());
  if (becomes_idle(group->queue())) return;
  group->abort("rank " + std::to_string(rank_) + " has left group " + name_ +
               " with operations under way. Fix: wait() for every operation before "
               "destroy_process_group()");
  becomes_idle(group->queue());
}

void TpshmBackend::shutdown() {
  leave();
  rest_->shutdown();
}

void TpshmBackend::abort() {
  group()->abort("abort() was called on rank " + std::to_string(rank_) + " of group " + name_);
  rest_->abort();
}

void TpshmBackend::setTimeout(std::chrono::milliseconds timeout) {
  group()->set_timeout(seconds(timeout));
  options_->timeout = timeout;
  rest_->setTimeout(timeout);
}

std::shared_ptr<PeerGroup> TpshmBackend::group() const {
  std::lock_guard lock(mutex_);
  if (group_) return group_;
  C10_THROW_ERROR(DistBackendError, "tpshm: group " + name_ +
                                        " was destroyed. Fix: make a new one, and communicate "
                                        "before destroy_process_group()");
}

c10d::Backend& TpshmBackend::rest() {
  group();  // not once it is shut down
  ++sequence_;
  return *rest_;
}

TpshmBackend::WorkPtr TpshmBackend::launch(Call call, std::function<void(PeerGroup&)> body) {
  const std::shared_ptr<PeerGroup> group = this->group();
  const auto work = c10::make_intrusive<TpshmWork>(rank_, call.operation, call.title, call.inputs,
                                                   std::move(call.outputs), ++sequence_);
  if (call.asynchronous) {
    group->queue().submit([work, group, body = std::move(body), completions = completions_] {
      carry_out(*work, *group, body, completions);
    });
  } else {
    carry_out(*work, *group, body, completions_);
  }
  return work;
}

c10::intrusive_ptr<c10d::Backend> TpshmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& opts) {
  const c10::intrusive_ptr<Options> glooes = rest_->getBackendOptions();  // of its own type
  glooes->group_name = opts->group_name;
  glooes->global_ranks_in_group = opts->global_ranks_in_group;
  return rest_->split(store, ranks, glooes);
}

TpshmBackend::WorkPtr TpshmBackend::send(Tensors& tensors, int peer, int tag) {
  return rest().send(tensors, peer, tag);
}

TpshmBackend::WorkPtr TpshmBackend::recv(Tensors& tensors, int peer, int tag) {
  return rest().recv(tensors, peer, tag);
}

TpshmBackend::WorkPtr TpshmBackend::recvAnysource(Tensors& tensors, int tag) {
  return rest().recvAnysource(tensors, tag);
}

TpshmBackend::WorkPtr TpshmBackend::allreduce_sparse(Tensors& tensors,
                                                     const c10d::AllreduceOptions& opts) {
  return rest().allreduce_sparse(tensors, opts);
}

void TpshmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool all_ranks) {
  rest().monitoredBarrier(opts, all_ranks);
}

}  // namespace tpkernels
