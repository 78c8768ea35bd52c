// Weights by plain copies out of every rank's compute copies. See [Note: copies from peers] in
// weights/access.h.
#pragma once

#include "context.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

class PeerCopyGather : public GatherTransport {
 public:
  PeerCopyGather(Context& context, Communicator& comm, WeightMemory& memory)
      : context_(context), comm_(comm), memory_(memory) {}

  bool can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>& outputs,
                  bool grouped) const override;
  Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor>& sources, bool grouped) override;
  bool is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const override;

 private:
  Context& context_;
  Communicator& comm_;
  WeightMemory& memory_;
};

}  // namespace lightning_zero
