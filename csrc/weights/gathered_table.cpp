#include "weights/gathered_table.h"

#include <algorithm>

namespace lightning_zero {

void GatheredStorages::add(const at::Tensor& gathered, int64_t index) {
  if (entries_.size() >= prune_at_)
    prune();
  auto* storage = gathered.storage().unsafeGetStorageImpl();
  entries_.insert_or_assign(storage, Entry{gathered.storage().getWeakStorageImpl(), index});
}

int64_t GatheredStorages::find(const at::Tensor& tensor) {
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

void GatheredStorages::prune() {
  for (auto it = entries_.begin(); it != entries_.end();) {
    it = it->second.storage.expired() ? entries_.erase(it) : std::next(it);
  }
  prune_at_ = std::max<size_t>(64, 2 * entries_.size());
}

}  // namespace lightning_zero
