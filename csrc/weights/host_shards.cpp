#include "weights/host_shards.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

namespace lightning_zero {

bool HostShards::any() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [](const auto& record) {
    return record->compute_copy.own.defined() || record->full_precision_copy.own.defined();
  });
}

bool HostShards::any_stale() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [&](const auto& record) {
    const auto now = record->stamp(context_.epoch);
    const auto old = [&](const ShardCopy& copy) { return copy.own.defined() && copy.written != now; };
    return old(record->compute_copy) || old(record->full_precision_copy);
  });
}

bool HostShards::on_any_rank(bool yes) {
  auto flag = at::tensor({static_cast<int64_t>(yes)}, at::kLong);
  comms_.control()->all_reduce_max(flag, "whether weights have changed");
  return *flag.const_data_ptr<int64_t>() > 0;
}

Pending HostShards::refresh() {
  std::vector<at::Tensor> whole, own, shards;
  int64_t bytes = 0;
  for (auto& record : context_.records) {
    for (auto* copy : {&record->compute_copy, &record->full_precision_copy}) {
      if (!copy->own.defined())
        continue;
      const auto numel = record->shard_numel();
      whole.push_back(copy->own);
      own.push_back(piece(copy->own, context_.across.rank * numel, numel));
      shards.push_back(record->shard);
      bytes += static_cast<int64_t>(copy->own.nbytes());
      copy->written = record->stamp(context_.epoch);
    }
  }
  at::_foreach_copy_(own, shards);
  context_.count("gather_bytes_across", bytes);
  context_.count("host_shard_refreshes");
  // In place: what is gathered begins where it ends up.
  return comms_.gathers_across()->all_gather_group(std::move(whole), std::move(own));
}

}  // namespace lightning_zero
