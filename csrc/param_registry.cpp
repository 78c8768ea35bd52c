#include "param_registry.h"

namespace lightning_zero {

ShardTable& ShardTable::instance() {
  static ShardTable table;
  return table;
}

void ShardTable::add(const at::Tensor& shard, ParamRef ref) {
  std::lock_guard<std::mutex> lock(mutex_);
  refs_.insert_or_assign(shard.const_data_ptr(), ref);
}

void ShardTable::remove(const at::Tensor& shard) {
  std::lock_guard<std::mutex> lock(mutex_);
  refs_.erase(shard.const_data_ptr());
}

bool ShardTable::contains(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  return refs_.count(address) > 0;
}

ParamRef ShardTable::find(const at::Tensor& shard, const char* op) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = refs_.find(shard.const_data_ptr());
  TORCH_CHECK_VALUE(
      it != refs_.end(), "lightning_zero::", op, " got a tensor of shape ", shard.sizes(), " and dtype ",
      shard.scalar_type(), " on ", shard.device(),
      " that is no shard of a live engine. A parameter was probably replaced after the model was sharded: by "
      "assigning module.weight = nn.Parameter(...), by module.to()/half()/cuda(), by copy.deepcopy(), or the "
      "engine was closed. Change the parameter's values in place, or inside "
      "lightning_zero.full_parameters(module).");
  return it->second;
}

void GatheredTable::add(const at::Tensor& gathered, int64_t index) {
  if (entries_.size() >= prune_at_)
    prune();
  auto* storage = gathered.storage().unsafeGetStorageImpl();
  entries_.insert_or_assign(storage, Entry{gathered.storage().getWeakStorageImpl(), index});
}

int64_t GatheredTable::find(const at::Tensor& tensor) {
  if (!tensor.has_storage())
    return -1;
  auto it = entries_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == entries_.end())
    return -1;
  if (it->second.storage.expired()) {
    entries_.erase(it);
    return -1;
  }
  return it->second.index;
}

void GatheredTable::clear() {
  entries_.clear();
}

void GatheredTable::prune() {
  for (auto it = entries_.begin(); it != entries_.end();) {
    it = it->second.storage.expired() ? entries_.erase(it) : std::next(it);
  }
  prune_at_ = std::max<size_t>(64, 2 * entries_.size());
}

}  // namespace lightning_zero
