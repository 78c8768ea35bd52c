// Which parameter a gathered weight is of.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <unordered_map>

namespace lightning_zero {

// storage of a gathered weight -> parameter, for the saved-tensor hooks of eager code. Keyed by the storage
// object, which a weak reference keeps from being reused, never by address: a freed weight's address
// soon belongs to something else.
class GatheredStorages {
 public:
  void add(const at::Tensor& gathered, int64_t index);
  int64_t find(const at::Tensor& tensor);  // -1 when not a gathered weight, or a view of one
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t index;
  };
  void prune();
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  size_t prune_at_ = 64;
};

}  // namespace lightning_zero
