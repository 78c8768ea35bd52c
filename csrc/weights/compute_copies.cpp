#include "weights/compute_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "runtime/tensors.h"

namespace lightning_zero {

void ComputeCopies::add_memory(at::Tensor copies, at::Tensor shards) {
  TORCH_INTERNAL_ASSERT(copies.numel() == shards.numel());
  memory_.emplace_back(std::move(copies), std::move(shards));
}

bool ComputeCopies::is_stale(const ParamRecord& record) const {
  return record.compute_copy.written != record.stamp(context_.epoch);
}

void ComputeCopies::is_written(ParamRecord& record) {
  record.compute_copy.written = record.stamp(context_.epoch);
}

std::vector<ParamRecord*> ComputeCopies::stale(bool everything) const {
  std::vector<ParamRecord*> found;
  for (auto& record : context_.records) {
    if (record->compute_copy.own.defined() && (everything || is_stale(*record)))
      found.push_back(record.get());
  }
  return found;
}

void ComputeCopies::write(ParamRecord& record) {
  TORCH_INTERNAL_ASSERT(!recording, "a replay would write the compute copy of ", record.name, " each time");
  at::NoGradGuard no_grad;
  record.compute_copy.own.copy_(record.shard);
  is_written(record);
  context_.count("compute_copy_writes");
}

void ComputeCopies::write_all() {
  for (auto& [copies, shards] : memory_) copies.copy_(shards);
  for (auto& record : context_.records) {
    if (record->compute_copy.own.defined())
      is_written(*record);
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
