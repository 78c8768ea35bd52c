// Memory for whole weights, and the way in which they come there.
#pragma once

#include <memory>
#include <vector>

#include "context.h"
#include "transport/transport.h"

namespace lightning_zero {

class Gatherer {
 public:
  // `transports`: the best first; the last can gather everything.
  Gatherer(Context& context, std::vector<std::unique_ptr<GatherTransport>> transports)
      : context_(context), transports_(std::move(transports)) {}

  // With the padding of all ranks' shards.
  int64_t full_numel(const ParamRecord& record) const { return context_.shards() * record.shard_numel(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  // One weight, wherever it is read, into `output`, or memory of its own where that is undefined. `sources`
  // must live until it is there.
  Pending gather(ParamRecord& record, at::ScalarType dtype, at::Tensor& output,
                 std::vector<at::Tensor>& sources);

  // Starts to bring whole weights into `outputs`, for compiled code. `sources`: likewise.
  Pending gather_group(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                       std::vector<at::Tensor>& sources);

  // Whether a group could be gathered by this rank alone before it is asked for.
  bool is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const;

  // One weight without any other rank, unless that is impossible: whether it is there.
  bool gather_alone(ParamRecord& record, const at::Tensor& output);

 private:
  GatherTransport& transport_for(const std::vector<ParamRecord*>& records,
                                 const std::vector<at::Tensor>& outputs, bool grouped) const;

  Context& context_;
  std::vector<std::unique_ptr<GatherTransport>> transports_;
};

}  // namespace lightning_zero
