// Gathers weights and reduces gradients by collectives of a process group, which is always possible.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "context.h"
#include "gradients/bucket.h"
#include "tensor_ops.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

class CollectiveGather : public GatherTransport {
 public:
  CollectiveGather(Context& context, Communicators& comms, WeightMemory& memory)
      : context_(context), comm_(comms.gathers()), inter_host_(comms.inter_host_gathers()), memory_(memory) {}

  bool can_gather(const std::vector<ParamRecord*>&, const std::vector<at::Tensor>&, bool) const override {
    return true;
  }
  Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor>& sources, bool grouped) override;

 private:
  // With several hosts: gather host shards first, unless they are available.
  Pending gather_inter_host(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>& outputs,
                            std::vector<at::Tensor>& sources, bool grouped);

  Context& context_;
  Communicator& comm_;
  Communicator* inter_host_;  // null with one host
  WeightMemory& memory_;
};

// Gradients are summed unscaled, and sums are scaled when they become float32. So gradients can be sent from
// their own memory, and factors such as 1/3 are not rounded. Sums in half precision could overflow, so there
// gradients are scaled when they are copied into a bucket, as in DDP.
class CollectiveReduce : public ReduceTransport {
 public:
  CollectiveReduce(const Context& context, Communicator& comm) : context_(context), comm_(comm) {}

  void reduce(ReduceBucket& bucket) override;
  double scale(at::ScalarType dtype) const override {
    return averages(dtype) ? 1.0 : 1.0 / static_cast<double>(context_.size);
  }
  bool averages(at::ScalarType dtype) const override { return dtype != at::kHalf; }
  // gloo reduces in place and needs one tensor.
  bool uses_own_send_buffers() const override { return has_streams(context_.device); }
  int buckets_in_flight() const override { return 2; }

 private:
  const Context& context_;
  Communicator& comm_;
};

Pending CollectiveGather::gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                                 std::vector<at::Tensor>& sources, bool grouped) {
  if (inter_host_ != nullptr)
    return gather_inter_host(records, outputs, sources, grouped);
  if (!grouped) {
    auto& record = *records.front();
    const auto dtype = outputs[0].scalar_type();
    auto source = memory_.local_source(record, dtype);
    if (!source.defined() && dtype == at::kFloat8_e4m3fn)
      sources.push_back(source = record.cast(record.shard, dtype));
    return source.defined() ? comm_.all_gather(outputs[0], source)
                            : comm_.all_gather(outputs[0], record.shard, dtype);
  }
  for (size_t i = 0; i < records.size(); ++i) {
    auto source = memory_.local_source(*records[i], outputs[i].scalar_type());
    const auto dtype = outputs[i].scalar_type();
    sources.push_back(source.defined() ? std::move(source) : records[i]->cast(records[i]->shard, dtype));
  }
  return comm_.all_gather_group(std::move(outputs), sources);
}

Pending CollectiveGather::gather_inter_host(const std::vector<ParamRecord*>& records,
                                            const std::vector<at::Tensor>& outputs,
                                            std::vector<at::Tensor>& sources, bool grouped) {
  std::vector<at::Tensor> host_shards, missing, shards;
  for (size_t i = 0; i < records.size(); ++i) {
    auto& record = *records[i];
    const auto dtype = outputs[i].scalar_type();
    // All ranks must decide alike. They do after the point at which host shards are brought up to date. At
    // other points a host shard may be stale on this rank only.
    auto found = grouped ? memory_.local_source(record, dtype) : at::Tensor();
    if (found.defined()) {
      memory_.wait_for_shard(record, dtype, /*from_peers=*/false);
    } else {
      found = tensors::empty(record.host_shard_numel(), record.shard.options().dtype(dtype));
      missing.push_back(found);
      shards.push_back(record.cast(record.shard, dtype));
      context_.count("gather_bytes_across", static_cast<int64_t>(found.nbytes()));
    }
    host_shards.push_back(std::move(found));
  }
  sources.insert(sources.end(), shards.begin(), shards.end());
  sources.insert(sources.end(), host_shards.begin(), host_shards.end());
  if (missing.empty())
    return comm_.all_gather_group(outputs, host_shards);
  return comm_.run_after(inter_host_->all_gather_group(missing, shards),
                         [&] { return comm_.all_gather_group(outputs, host_shards); });
}

void CollectiveReduce::reduce(ReduceBucket& bucket) {
  const auto send = bucket.own_send_buffers ? at::Tensor() : bucket.send();
  const double factor = averages(bucket.dtype()) ? 1.0 / static_cast<double>(context_.intra_host.size) : 1.0;
  std::vector<at::Tensor> parts, runs;
  for (size_t index = 0; index < bucket.slots().size(); ++index) {
    const auto& slot = bucket.slots()[index];
    parts.push_back(flat_range(bucket.recv(), slot.offset, slot.record->host_shard_numel()));
    runs.push_back(bucket.send_slice(index));
  }
  bucket.buffer()->pending = comm_.reduce_scatter_group(parts, runs, send, [this, &bucket, factor] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    bucket.accumulate(0, bucket.chunk(), make_product(bucket.recv(), factor));
    bucket.record_read(current_stream(context_.device));
  });
}

}  // namespace

std::unique_ptr<GatherTransport> make_collective_gather(Context& context, Communicators& comms,
                                                        WeightMemory& memory) {
  return std::make_unique<CollectiveGather>(context, comms, memory);
}

std::unique_ptr<ReduceTransport> make_collective_reduce(const Context& context, Communicator& comm) {
  return std::make_unique<CollectiveReduce>(context, comm);
}

}  // namespace lightning_zero
