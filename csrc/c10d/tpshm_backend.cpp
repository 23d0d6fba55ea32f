#include "c10d/tpshm_backend.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "c10d/backend_threads.h"
#include "c10d/tpshm_work.h"
#include "runtime/interrupts.h"
#include "runtime/peer_groups.h"

namespace tpkernels {
namespace {

Seconds seconds(std::chrono::milliseconds time) {
  return std::chrono::duration_cast<Seconds>(time);
}

std::exception_ptr backend_error(const std::string& what) {
  try {
    C10_THROW_ERROR(DistBackendError, "tpshm: " + what);
  } catch (...) {
    return std::current_exception();
  }
}

void carry_out(TpshmWork& work, PeerGroup& group, const std::function<void(PeerGroup&)>& body,
               BackendThreads& threads) {
  const auto complete = [&](const std::exception_ptr& error) { work.complete(error, threads); };
  try {
    // Gradients and versions of tensors are no matter of a collective, nor are modes and transforms
    // that the thread is in which waits for it.
    const c10::impl::ForceDispatchKeyGuard plain(
        c10::default_included_set,
        c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    body(group);
  } catch (const Interrupted&) {
    complete(backend_error(group.ended().value_or("interrupted by a signal")));
    throw;
  } catch (const PeerError& error) {
    return complete(backend_error(error.what()));
  } catch (...) {
    return complete(std::current_exception());
  }
  complete(nullptr);
}

}  // namespace

TpshmBackend::TpshmBackend(std::shared_ptr<PeerGroup> group, c10::intrusive_ptr<c10d::Backend> rest,
                           std::string name, std::vector<uint64_t> global_ranks)
    : c10d::Backend(group->rank(), group->world()),
      group_(std::move(group)),
      rest_(std::move(rest)),
      name_(std::move(name)),
      options_(c10::make_intrusive<Options>(
          "tpshm", std::chrono::duration_cast<std::chrono::milliseconds>(group_->timeout()))),
      threads_(BackendThreads::of(group_)) {
  options_->group_name = name_;
  options_->global_ranks_in_group = std::move(global_ranks);
  register_peer_group(name_, group_);
}

TpshmBackend::~TpshmBackend() {
  leave();
  if (threads_->forked()) rest_.release();  // it would wait for threads that it does not have
}

void TpshmBackend::leave() {
  std::shared_ptr<PeerGroup> group;
  {
    std::lock_guard lock(mutex_);
    group.swap(group_);
  }
  if (!group) return;
  forget_peer_group(name_, group.get());
  threads_->settle_group();
}

void TpshmBackend::shutdown() {
  leave();
  if (!threads_->forked()) rest_->shutdown();
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
  const auto work =
      c10::make_intrusive<TpshmWork>(call.asynchronous ? group : nullptr, rank_, call.operation,
                                     call.title, call.inputs, std::move(call.outputs), ++sequence_);
  if (call.asynchronous) {
    group->queue().submit([work, group, body = std::move(body), threads = threads_] {
      carry_out(*work, *group, body, *threads);
    });
  } else {
    raising_causes([&] { carry_out(*work, *group, body, *threads_); });
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
