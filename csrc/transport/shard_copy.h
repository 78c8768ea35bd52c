// Weights by plain copies out of every rank's shards, where ranks take turns: no other rank need come along.
// See [Note: turns] in weights/access.h.
#pragma once

#include "context.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

class ShardCopyGather : public GatherTransport {
 public:
  ShardCopyGather(Context& context, Communicator& comm, WeightMemory& memory)
      : context_(context), comm_(comm), memory_(memory) {}

  bool can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>& outputs,
                  bool grouped) const override;
  // What is wanted in a dtype that nobody keeps is cast here.
  Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor>& sources, bool grouped) override;
  bool needs_no_rank() const override { return true; }

 private:
  Context& context_;
  Communicator& comm_;
  WeightMemory& memory_;
};

}  // namespace lightning_zero
