#include "weights/compute_copies.h"

#include <ATen/ATen.h>

namespace lightning_zero {

void ComputeCopies::add_memory(at::Tensor copies, at::Tensor shards) {
  TORCH_INTERNAL_ASSERT(copies.numel() == shards.numel());
  memory_.emplace_back(std::move(copies), std::move(shards));
}

bool ComputeCopies::is_stale(const ParamRecord& record) const {
  return record.shadow_epoch != context_.epoch ||
         record.shadow_version != static_cast<int64_t>(record.param._version());
}

void ComputeCopies::is_written(ParamRecord& record) {
  record.shadow_epoch = context_.epoch;
  record.shadow_version = static_cast<int64_t>(record.param._version());
}

std::vector<ParamRecord*> ComputeCopies::stale(bool everything) const {
  std::vector<ParamRecord*> found;
  for (auto& record : context_.records) {
    if (record->shadow.defined() && (everything || is_stale(*record)))
      found.push_back(record.get());
  }
  return found;
}

void ComputeCopies::write(ParamRecord& record) {
  TORCH_INTERNAL_ASSERT(!recording, "a replay would write the shadow of ", record.name, " each time");
  at::NoGradGuard no_grad;
  record.shadow.copy_(record.shard);
  is_written(record);
  context_.count("shadow_writes");
}

void ComputeCopies::write_all() {
  for (auto& [copies, shards] : memory_) copies.copy_(shards);
  for (auto& record : context_.records) {
    if (record->shadow.defined())
      is_written(*record);
  }
}

void ComputeCopies::write_exact(const std::vector<ParamRecord*>& records) {
  std::vector<at::Tensor> copies, shards;
  for (auto* record : records) {
    if (record->exact.defined()) {
      copies.push_back(record->exact);
      shards.push_back(record->shard);
    }
  }
  if (!copies.empty())
    at::_foreach_copy_(copies, shards);
}

}  // namespace lightning_zero
