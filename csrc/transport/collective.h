// Weights and gradients by collectives of a process group: what always can be done.
#pragma once

#include "context.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

class CollectiveGather : public GatherTransport {
 public:
  CollectiveGather(Communicator& comm, WeightMemory& memory) : comm_(comm), memory_(memory) {}

  bool can_gather(const std::vector<ParamRecord*>&, const std::vector<at::Tensor>&, bool) const override {
    return true;
  }
  Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor>& sources, bool grouped) override;

 private:
  Communicator& comm_;
  WeightMemory& memory_;
};

// Gradients are scaled by 1/ranks while they are copied into a bucket, and then summed, as DDP does.
class CollectiveReduce : public ReduceTransport {
 public:
  CollectiveReduce(const Context& context, Communicator& comm) : context_(context), comm_(comm) {}

  void reduce(ReduceBucket& bucket) override;
  double scale() const override { return 1.0 / static_cast<double>(context_.size); }
  bool wants_own_send_buffers() const override { return false; }
  int buckets_in_flight() const override { return 2; }

 private:
  const Context& context_;
  Communicator& comm_;
};

}  // namespace lightning_zero
