#include "weights/compute_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "over_copies.h"
#include "runtime/tensors.h"

namespace lightning_zero {

void ComputeShards::add_memory(at::Tensor copies, at::Tensor shards) {
  TORCH_INTERNAL_ASSERT(copies.numel() == shards.numel());
  memory_.emplace_back(std::move(copies), std::move(shards));
}

bool ComputeShards::has_memory() const {
  return !memory_.empty() || std::any_of(context_.records.begin(), context_.records.end(),
                                         [](const auto& record) { return record->compute_shard.written_by_optimizer; });
}

Stamp ComputeShards::now(const ParamRecord& record) const {
  return record.stamp(record.compute_shard.written_by_optimizer ? context_.user_write_count : context_.shard_version);
}

bool ComputeShards::is_stale(const ParamRecord& record) const {
  const auto& copy = record.compute_shard;
  return grad_aliasing::may_write(record) && (copy.state != ComputeShardState::WEIGHT || copy.written != now(record));
}

bool ComputeShards::any_unclaimed_gradient() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [](const auto& record) {
    return record->compute_shard.state != ComputeShardState::WEIGHT && grad_aliasing::may_write(*record);
  });
}

void ComputeShards::is_written(ParamRecord& record) {
  record.compute_shard.written = now(record);
  record.compute_shard.state = ComputeShardState::WEIGHT;
}

std::vector<ParamRecord*> ComputeShards::stale(bool all) const {
  std::vector<ParamRecord*> found;
  for (auto& record : context_.records) {
    const bool wanted = all ? grad_aliasing::may_write(*record) : is_stale(*record);
    if (record->compute_shard.local.defined() && wanted)
      found.push_back(record.get());
  }
  return found;
}

void ComputeShards::write(ParamRecord& record) {
  TORCH_INTERNAL_ASSERT(!recording, "a replay would write the compute copy of ", record.name, " each time");
  at::NoGradGuard no_grad;
  record.compute_shard.local.copy_(record.shard);
  is_written(record);
  context_.count("compute_shard_writes");
}

void ComputeShards::write_all() {
  const auto may_write = [](const auto& record) { return grad_aliasing::may_write(*record); };
  const bool all = std::all_of(context_.records.begin(), context_.records.end(), may_write);
  if (all) {
    for (auto& [copies, shards] : memory_) copies.copy_(shards);
  }
  for (auto& record : context_.records) {
    if (!record->compute_shard.local.defined())
      continue;
    if (all && !record->compute_shard.written_by_optimizer)
      is_written(*record);
    else if (record->compute_shard.written_by_optimizer ? is_stale(*record) : may_write(record))
      write(*record);
  }
}

std::vector<int64_t> ComputeShards::written() const {
  Lock lock(context_.mutex);
  std::vector<int64_t> found;
  for (const auto& record : context_.records) {
    if (record->compute_shard.written_by_optimizer && record->compute_shard.local.defined() && !is_stale(*record))
      found.push_back(record->index);
  }
  return found;
}

void ComputeShards::mark_compute_shards_written(std::vector<int64_t> indices, bool written) {
  Lock lock(context_.mutex);
  for (const auto index : indices) {
    auto& record = context_.at(index);
    TORCH_INTERNAL_ASSERT(record.compute_shard.written_by_optimizer && record.compute_shard.local.defined(), record.name);
    record.compute_shard.written = written ? now(record) : Stamp{};
  }
}

void ComputeShards::write_full_precision(const std::vector<ParamRecord*>& records) {
  std::vector<at::Tensor> copies, shards;
  for (auto* record : records) {
    if (record->full_precision_shard.local.defined()) {
      copies.push_back(record->full_precision_shard.local);
      shards.push_back(record->shard);
    }
  }
  if (!copies.empty())
    tensors::copy_each(copies, shards);
}

}  // namespace lightning_zero
