#include "transport/shard_copy.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lightning_zero {

bool ShardCopyGather::can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>&,
                                 bool) const {
  return memory_.takes_turns() && std::none_of(records.begin(), records.end(), [](const ParamRecord* record) {
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
    if (const auto& copies = record.copies_in(outputs[i].scalar_type()); !copies.empty()) {
      to.push_back(outputs[i]);
      from.push_back(&copies);
      continue;
    }
    auto whole = at::empty({outputs[i].numel()}, record.shard.options());
    comm_.copy_group({whole}, {&record.shards}).wait(context_.device);
    outputs[i].copy_(whole);
  }
  context_.count("copied_weights", static_cast<int64_t>(records.size()));
  return comm_.copy_group(std::move(to), from);
}

}  // namespace lightning_zero
