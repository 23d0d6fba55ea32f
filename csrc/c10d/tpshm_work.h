// What a collective of the tpshm backend returns: done already, or done by the group's queue.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace tpkernels {

class TpshmWork : public c10d::Work {
 public:
  // `outputs` as ProcessGroupGloo's works have them: one list, or for a list of lists several.
  TpshmWork(int rank, c10d::OpType operation, const char* title,
            const std::vector<at::Tensor>& inputs, std::vector<std::vector<at::Tensor>> outputs,
            uint64_t sequence);

  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  // Once, by whoever has carried it out: completes the future, then lets go those who wait. Where
  // somebody has the future, `elsewhere` has it done: its callbacks are anybody's code, which may
  // wait for the operations that come next.
  void complete(std::exception_ptr error,
                const std::function<void(std::function<void()>)>& elsewhere);

 private:
  c10::IValue value() const;
  c10::TypePtr value_type() const;

  const std::vector<std::vector<at::Tensor>> outputs_;
  const uint64_t sequence_;
  // Guarded by mutex_. The future is made when asked for, by then settled or not.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
  std::exception_ptr error_;
};

}  // namespace tpkernels
