// Weights by plain copies out of every rank's shards, where ranks take turns: no other rank need come along.
// See [Note: turns] in weights/access.h.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "context.h"
#include "runtime/tensors.h"
#include "transport/communicators.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

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

bool ShardCopyGather::can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>&,
                                 bool) const {
  return memory_.uses_epoch_lock() && std::none_of(records.begin(), records.end(), [](const ParamRecord* record) {
           return record->shards.empty();
         });
}

Pending ShardCopyGather::gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                                std::vector<at::Tensor>&, bool) {
  memory_.begin_reading();
  std::vector<at::Tensor> to;
  std::vector<const std::vector<at::Tensor>*> from;
  for (size_t i = 0; i < records.size(); ++i) {
    const auto& record = *records[i];
    const auto dtype = outputs[i].scalar_type();
    const bool is_weight = dtype == record.shard.scalar_type() || record.compute_copy.holds == InCopy::WEIGHT;
    if (const auto& copies = record.copies_in(dtype); is_weight && !copies.empty()) {
      to.push_back(outputs[i]);
      from.push_back(&copies);
      continue;
    }
    auto whole = tensors::empty(outputs[i].numel(), record.shard.options());
    comm_.copy_group({whole}, {&record.shards}).wait(context_.device);
    outputs[i].copy_(whole);
  }
  context_.count("copied_weights", static_cast<int64_t>(records.size()));
  return comm_.copy_group(std::move(to), from);
}

}  // namespace

std::unique_ptr<GatherTransport> make_shard_copy_gather(Context& context, Communicators& comms,
                                                        WeightMemory& memory) {
  return std::make_unique<ShardCopyGather>(context, comms.gathers(), memory);
}

}  // namespace lightning_zero
