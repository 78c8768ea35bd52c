// Gathers weights by copies from every rank's compute shards (PeerCopyGather, see [Note: copies from peers])
// or shards (ShardCopyGather, see [Note: epoch lock]), both in weights/compute_shards.h.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "context.h"
#include "gradients/grad_aliasing.h"
#include "tensor_ops.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

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

bool PeerCopyGather::is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const {
  return memory_.is_published() &&
         std::all_of(records.begin(), records.end(),
                     [&](const ParamRecord* record) { return !record->peer_shards_in(dtype).empty(); });
}

bool PeerCopyGather::can_gather(const std::vector<ParamRecord*>& records,
                                const std::vector<at::Tensor>& outputs, bool grouped) const {
  if (!grouped)
    return false;  // a copy may be stale
  const auto dtype = outputs[0].scalar_type();
  const bool same_dtype =
      std::all_of(outputs.begin(), outputs.end(), [&](const auto& o) { return o.scalar_type() == dtype; });
  return same_dtype && is_ready(records, dtype);
}

Pending PeerCopyGather::gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                               std::vector<at::Tensor>&, bool) {
  const auto dtype = outputs[0].scalar_type();
  std::vector<const std::vector<at::Tensor>*> peers;
  for (auto* record : records) {
    if (dtype != record->shard.scalar_type())
      grad_aliasing::check_is_weight(*record);
    memory_.wait_for_shard(*record, dtype, /*from_peers=*/true);
    peers.push_back(&record->peer_shards_in(dtype));
  }
  context_.count("copied_weights", static_cast<int64_t>(records.size()));
  return comm_.copy_group(std::move(outputs), peers);
}

}  // namespace

std::unique_ptr<GatherTransport> make_peer_copy_gather(Context& context, Communicators& comms,
                                                       WeightMemory& memory) {
  return std::make_unique<PeerCopyGather>(context, comms.gathers(), memory);
}

// Copies from shards need no other rank.

namespace {

class ShardCopyGather : public GatherTransport {
 public:
  ShardCopyGather(Context& context, Communicator& comm, WeightMemory& memory)
      : context_(context), comm_(comm), memory_(memory) {}

  bool can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>& outputs,
                  bool grouped) const override;
  // Casts here if no rank keeps the requested dtype.
  Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor>& sources, bool grouped) override;
  bool gathers_alone() const override { return true; }

 private:
  Context& context_;
  Communicator& comm_;
  WeightMemory& memory_;
};

bool ShardCopyGather::can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>&,
                                 bool) const {
  return memory_.uses_epoch_lock() &&
         std::none_of(records.begin(), records.end(),
                      [](const ParamRecord* record) { return record->shards.empty(); });
}

Pending ShardCopyGather::gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                                std::vector<at::Tensor>&, bool) {
  memory_.begin_reading();
  std::vector<at::Tensor> to;
  std::vector<const std::vector<at::Tensor>*> from;
  for (size_t i = 0; i < records.size(); ++i) {
    const auto& record = *records[i];
    const auto dtype = outputs[i].scalar_type();
    const bool is_weight =
        dtype == record.shard.scalar_type() || record.compute_shard.state == ComputeShardState::WEIGHT;
    if (const auto& copies = record.peer_shards_in(dtype); is_weight && !copies.empty()) {
      to.push_back(outputs[i]);
      from.push_back(&copies);
      continue;
    }
    auto full = tensors::empty(outputs[i].numel(), record.shard.options());
    comm_.copy_group({full}, {&record.shards}).wait(context_.device);
    outputs[i].copy_(dtype == at::kFloat8_e4m3fn ? record.cast(full, dtype) : full);
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
