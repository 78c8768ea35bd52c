#include "transport/collective.h"

#include <ATen/ATen.h>

#include "gradients/bucket.h"

namespace lightning_zero {

Pending CollectiveGather::gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                                 std::vector<at::Tensor>& sources, bool grouped) {
  if (!grouped) {
    auto& record = *records.front();
    const auto source = memory_.source_in(record, outputs[0].scalar_type());
    return source.defined() ? comm_.all_gather(outputs[0], source)
                            : comm_.all_gather(outputs[0], record.shard, outputs[0].scalar_type());
  }
  for (size_t i = 0; i < records.size(); ++i) {
    auto source = memory_.source_in(*records[i], outputs[i].scalar_type());
    sources.push_back(source.defined() ? std::move(source) : records[i]->shard.to(outputs[i].scalar_type()));
  }
  return comm_.all_gather_group(std::move(outputs), sources);
}

void CollectiveReduce::reduce(ReduceBucket& bucket) {
  const auto send = bucket.send();
  std::vector<at::Tensor> parts, runs;
  for (size_t index = 0; index < bucket.slots().size(); ++index) {
    parts.push_back(bucket.part(bucket.slots()[index]));
    runs.push_back(bucket.run(index));
  }
  bucket.buffer()->pending = comm_.reduce_scatter_group(parts, runs, send, c10d::ReduceOp::SUM, [&bucket] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    bucket.accumulate(bucket.recv().unsqueeze(0), 0);
  });
}

}  // namespace lightning_zero
