#include "weights/compute_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "over_copies.h"
#include "runtime/tensors.h"

namespace lightning_zero {

void ComputeCopies::add_memory(at::Tensor copies, at::Tensor shards) {
  TORCH_INTERNAL_ASSERT(copies.numel() == shards.numel());
  memory_.emplace_back(std::move(copies), std::move(shards));
}

bool ComputeCopies::has_memory() const {
  return !memory_.empty() || std::any_of(context_.records.begin(), context_.records.end(),
                                         [](const auto& record) { return record->compute_copy.by_steps; });
}

Stamp ComputeCopies::now(const ParamRecord& record) const {
  return record.stamp(record.compute_copy.by_steps ? context_.told : context_.epoch);
}

bool ComputeCopies::is_stale(const ParamRecord& record) const {
  const auto& copy = record.compute_copy;
  return over_copies::may_write(record) && (copy.holds != InCopy::WEIGHT || copy.written != now(record));
}

bool ComputeCopies::any_lost() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [](const auto& record) {
    return record->compute_copy.holds != InCopy::WEIGHT && over_copies::may_write(*record);
  });
}

void ComputeCopies::is_written(ParamRecord& record) {
  record.compute_copy.written = now(record);
  record.compute_copy.holds = InCopy::WEIGHT;
}

std::vector<ParamRecord*> ComputeCopies::stale(bool everything) const {
  std::vector<ParamRecord*> found;
  for (auto& record : context_.records) {
    const bool wanted = everything ? over_copies::may_write(*record) : is_stale(*record);
    if (record->compute_copy.own.defined() && wanted)
      found.push_back(record.get());
  }
  return found;
}

void ComputeCopies::write(ParamRecord& record) {
  TORCH_INTERNAL_ASSERT(!recording, "a replay would write the compute copy of ", record.name, " each time");
  at::NoGradGuard no_grad;
  record.compute_copy.own.copy_(record.shard);
  is_written(record);
  context_.count("compute_shard_writes");
}

void ComputeCopies::write_all() {
  const auto may_write = [](const auto& record) { return over_copies::may_write(*record); };
  const bool all = std::all_of(context_.records.begin(), context_.records.end(), may_write);
  if (all) {
    for (auto& [copies, shards] : memory_) copies.copy_(shards);
  }
  for (auto& record : context_.records) {
    if (!record->compute_copy.own.defined())
      continue;
    if (all && !record->compute_copy.by_steps)
      is_written(*record);
    else if (record->compute_copy.by_steps ? is_stale(*record) : may_write(record))
      write(*record);
  }
}

std::vector<int64_t> ComputeCopies::written() const {
  Lock lock(context_.mutex);
  std::vector<int64_t> found;
  for (const auto& record : context_.records) {
    if (record->compute_copy.by_steps && record->compute_copy.own.defined() && !is_stale(*record))
      found.push_back(record->index);
  }
  return found;
}

void ComputeCopies::mark_compute_shards_written(std::vector<int64_t> indices, bool written) {
  Lock lock(context_.mutex);
  for (const auto index : indices) {
    auto& record = context_.at(index);
    TORCH_INTERNAL_ASSERT(record.compute_copy.by_steps && record.compute_copy.own.defined(), record.name);
    record.compute_copy.written = written ? now(record) : Stamp{};
  }
}

void ComputeCopies::write_full_precision(const std::vector<ParamRecord*>& records) {
  std::vector<at::Tensor> copies, shards;
  for (auto* record : records) {
    if (record->full_precision_copy.own.defined()) {
      copies.push_back(record->full_precision_copy.own);
      shards.push_back(record->shard);
    }
  }
  if (!copies.empty())
    tensors::copy_each(copies, shards);
}

}  // namespace lightning_zero
