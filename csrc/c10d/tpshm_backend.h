// The backend `tpshm` of torch.distributed: collectives of CPU tensors over the peer memory of one
// host, everything else over Gloo.
//
// A synchronous call is done by the thread that calls; an asynchronous one by the group's queue,
// in the order of the calls. A failure is c10::DistBackendError, which begins with "tpshm: ".
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d/backend_threads.h"
#include "comm/collectives.h"
#include "runtime/peer_group.h"

namespace tpkernels {

// Ranks share memory only if their builds have the same.
constexpr int kProtocolVersion = 1;

class TpshmBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `rest` does what shared memory cannot. The group is registered under `name` for as long as the
  // backend is neither shut down nor gone.
  TpshmBackend(std::shared_ptr<PeerGroup> group, c10::intrusive_ptr<c10d::Backend> rest,
               std::string name, std::vector<uint64_t> global_ranks);
  // No collective. What is still queued ends, if need be with the group.
  ~TpshmBackend() override;

  const std::string getBackendName() const override { return "tpshm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // each rank counts its own calls from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // By Gloo, of which the new backend is: `split` cannot agree with others on shared memory.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  // --- by Gloo ---
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all_ranks) override;

 private:
  struct Call {
    c10d::OpType operation;
    const char* title;  // for the profiler
    const Tensors& inputs;
    std::vector<Tensors> outputs;  // what the work's future holds
    bool asynchronous;
  };

  // Has `body` done, now or by the queue.
  WorkPtr launch(Call call, std::function<void(PeerGroup&)> body);
  // Where what comes next goes over Gloo.
  c10d::Backend& rest();

  std::shared_ptr<PeerGroup> group() const;  // throws once it is shut down
  void check_root(const char* what, int root) const;
  void leave();

  mutable std::mutex mutex_;
  std::shared_ptr<PeerGroup> group_;  // null once it is shut down
  c10::intrusive_ptr<c10d::Backend> rest_;
  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_{0};
  const std::shared_ptr<BackendThreads> threads_;  // the works hold them too
};

}  // namespace tpkernels
