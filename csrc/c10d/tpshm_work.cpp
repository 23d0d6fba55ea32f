#include "c10d/tpshm_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/interrupts.h"
#include "runtime/process_exit.h"

namespace tpkernels {
namespace {

using Future = c10::ivalue::Future;

void settle(Future& future, const std::exception_ptr& error, c10::IValue value) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(std::move(value));
  }
}

}  // namespace

TpshmWork::TpshmWork(std::shared_ptr<PeerGroup> group, int rank, c10d::OpType operation,
                     const char* title, const std::vector<at::Tensor>& inputs,
                     std::vector<std::vector<at::Tensor>> outputs, uint64_t sequence)
    : c10d::Work(rank, operation, title, inputs),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      group_(std::move(group)) {}

bool TpshmWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout;
  const auto limit = limited ? Clock::now() + timeout : Clock::time_point::max();
  raising_causes([&] {
    if (!limited) help();
    wait_until(limit);
  });
  stay_if_process_exits();
  return c10d::Work::wait(std::chrono::milliseconds(1));  // completed, or it says that it is not
}

void TpshmWork::help() {
  const std::shared_ptr<PeerGroup> group = under_way();
  if (!group) return;
  try {
    group->help_until([this] { return under_way() == nullptr; });
  } catch (const PeerError& error) {
    C10_THROW_ERROR(DistBackendError, std::string("tpshm: ") + error.what());
  }
}

void TpshmWork::wait_until(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  while (!completed_ && Clock::now() < limit) {
    cv_.wait_until(lock, std::min(limit, Clock::now() + kLookAroundEvery));
    if (completed_) return;
    const std::shared_ptr<PeerGroup> group = group_;
    lock.unlock();
    try {
      check_interrupt();
    } catch (const Interrupted&) {
      if (group) group->end_interrupted();
      throw;
    }
    lock.lock();
  }
}

std::shared_ptr<PeerGroup> TpshmWork::under_way() const {
  std::lock_guard lock(mutex_);
  return group_;
}

std::vector<at::Tensor> TpshmWork::result() {
  TORCH_CHECK(isCompleted(),
              "tpshm: result() of an operation that is under way. Fix: call wait() first");
  TORCH_CHECK(outputs_.size() <= 1,
              "tpshm: result() cannot give a list of lists. Fix: use get_future() and value()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_[0];
}

c10::IValue TpshmWork::value() const {
  if (outputs_.empty()) return c10::IValue(std::vector<at::Tensor>());
  if (outputs_.size() > 1) return c10::IValue(outputs_);
  return c10::IValue(outputs_[0]);
}

c10::TypePtr TpshmWork::value_type() const {
  const c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
  return outputs_.size() > 1 ? c10::TypePtr(c10::ListType::create(list)) : list;
}

c10::intrusive_ptr<Future> TpshmWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<Future>(value_type());
  const c10::intrusive_ptr<Future> future = future_;
  const bool settled = settled_;
  lock.unlock();  // a callback may ask for the future
  if (settled) settle(*future, error_, value());
  return future;
}

void TpshmWork::complete(std::exception_ptr error, BackendThreads& threads) {
  c10::intrusive_ptr<Future> future;
  {
    std::lock_guard lock(mutex_);
    settled_ = true;
    group_ = nullptr;
    error_ = error;
    future = future_;
  }
  if (!future) return finish(error);
  threads.complete([self = c10::intrusive_ptr<TpshmWork>::reclaim_copy(this), future, error] {
    settle(*future, error, self->value());
    self->finish(error);
  });
}

}  // namespace tpkernels
