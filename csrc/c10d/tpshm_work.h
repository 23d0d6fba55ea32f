// What a collective of the tpshm backend returns: done already, or done by the group's queue.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/backend_threads.h"

namespace tpkernels {

class TpshmWork : public c10d::Work {
 public:
  // `outputs` as ProcessGroupGloo's works have them: one list, or for a list of lists several.
  // `group`: whose queue carries it out; null where no queue does.
  TpshmWork(std::shared_ptr<PeerGroup> group, int rank, c10d::OpType operation, const char* title,
            const std::vector<at::Tensor>& inputs, std::vector<std::vector<at::Tensor>> outputs,
            uint64_t sequence);

  // Where the group's queue has not come to it, the caller does it. With a limit the caller waits.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  // Once, by whoever has carried it out: completes the future, where somebody has it on another
  // thread; then lets go those who wait.
  void complete(std::exception_ptr error, BackendThreads& threads);

 private:
  void help();
  void wait_until(Clock::time_point limit);
  std::shared_ptr<PeerGroup> under_way() const;  // whose queue has it to do, or null
  c10::IValue value() const;
  c10::TypePtr value_type() const;

  const std::vector<std::vector<at::Tensor>> outputs_;
  const uint64_t sequence_;
  // Guarded by mutex_.
  std::shared_ptr<PeerGroup> group_;  // until it is carried out
  // The future is made when asked for, by then settled or not.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
  std::exception_ptr error_;
};

}  // namespace tpkernels
