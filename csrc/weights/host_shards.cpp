#include "weights/host_shards.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "runtime/tensors.h"

namespace lightning_zero {

bool HostShards::any() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [](const auto& record) {
    return record->compute_shard.local.defined() || record->full_precision_shard.local.defined();
  });
}

bool HostShards::any_stale() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [&](const auto& record) {
    const auto now = record->stamp(context_.shard_version);
    const auto old = [&](const ShardCopy& copy) { return copy.local.defined() && copy.written != now; };
    return old(record->compute_shard) || old(record->full_precision_shard);
  });
}

bool HostShards::on_any_rank(bool yes) {
  const auto order = static_cast<int64_t>(order_ >> 2);
  std::vector<int64_t> said{yes, order, -order, exchange_.last()};
  comms_.control()->all_reduce_max(said, "whether weights have changed");
  if (said[1] == -said[2])
    agreed_ = used_.size();
  parts_ = said[3];
  return said[0] > 0;
}

ShardCopy& HostShards::read(ParamRecord& record, at::ScalarType dtype, bool compiled) {
  const bool own = record.shard.scalar_type() == dtype;
  auto& copy = own ? record.full_precision_shard : record.compute_shard;
  if (compiled && copy.use_order < 0) {
    copy.use_order = static_cast<int64_t>(used_.size());
    used_.push_back(&copy);
    order_ = (order_ ^ static_cast<uint64_t>(2 * record.index + own + 1)) * 0x100000001b3;  // as FNV does
  }
  return copy;
}

void HostShards::refresh() {
  const auto agreed = static_cast<int64_t>(agreed_);
  std::vector<ShardCopy*> copies(used_.begin(), used_.begin() + agreed);
  std::vector<at::Tensor> own, shards;
  for (auto& record : context_.records) {
    for (auto* copy : {&record->compute_shard, &record->full_precision_shard}) {
      if (!copy->local.defined())
        continue;
      const auto numel = record->shard_numel();
      own.push_back(piece(copy->local, context_.inter_host.rank * numel, numel));
      shards.push_back(record->shard);
      copy->name = &record->name;
      copy->written = record->stamp(context_.shard_version);
      if (copy->use_order < 0 || copy->use_order >= agreed)
        copies.push_back(copy);
    }
  }
  tensors::copy_each(own, shards);
  exchange_.begin(copies, parts_);
}

}  // namespace lightning_zero
