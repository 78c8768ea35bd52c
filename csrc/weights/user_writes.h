// Tracks weights that eager code has read, and copies the user's in-place writes to them into the shards.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "context.h"
#include "weights/compute_shards.h"
#include "weights/gather.h"
#include "weights/unsharded_cache.h"

namespace lightning_zero {

// Maps the storage of a gathered weight to its parameter, for the saved-tensor hooks of eager code. The key
// is the storage object, which a weak reference protects from reuse. An address would soon belong to another
// tensor.
class GatheredStorages {
 public:
  void add(const at::Tensor& gathered, int64_t index);
  int64_t find(const at::Tensor& tensor);  // -1: neither a gathered weight nor a view of one
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

class UserWrites {
 public:
  UserWrites(Context& context, ShardAccess& access, Gatherer& gatherer, UnshardedCache& unsharded_cache)
      : context_(context), access_(access), gatherer_(gatherer), unsharded_cache_(unsharded_cache) {}

  // A weight that eager code has read.
  struct Tracked {
    at::Tensor flat;  // one-dimensional, padded
    int64_t index;
    uint32_t version;  // the parameter's version at the gather
    // Returned to eager code: views of `flat`, until the user assigns to their `data`.
    std::vector<at::Tensor> views;
    uint64_t writes = 0;  // write_count() when the shard changed; later writes are too late
    at::Tensor before;    // this rank's elements at that time
    bool is_held();
    uint64_t write_count() const;
  };

  // Return the number of tracked weights.
  size_t watched() const { return tracked_.size(); }
  // Set an op `() -> ()` that is called before user writes change shards, which an asynchronous save may be
  // copying. It is not called for weights that cannot have been written, so that a forward does not wait for
  // it.
  void set_before_write_op(std::string op) { before_write_op_ = std::move(op); }
  // Return the tracked weight of this parameter and dtype; null if there is none.
  Tracked* find_tracked(int64_t index, at::ScalarType dtype);
  // Eager code receives `full`, a view of `flat`. `before`: the tracked weight with this memory, or null.
  void track(Tracked* before, const at::Tensor& flat, const at::Tensor& full, const ParamRecord& record);

  // Copy user writes to tracked weights into their shards. `forget`: also stop tracking, because the shards
  // are about to change.
  void sync(bool forget);
  // The variant with an epoch lock: user writes begin a write epoch, and weights without writes must not.
  void apply_with_epoch_lock();
  // Stop tracking all weights. Later writes are not noticed.
  void drop();
  // Return the index of the parameter of which `tensor` is a gathered weight or a view of one; otherwise -1.
  int64_t find_gathered(const at::Tensor& tensor);
  void close();

 private:
  void absorb_data_assignment(Tracked& weight);
  void raise_if_late();
  // Return a view of this rank's elements, without padding.
  at::Tensor own_part(const Tracked& weight) const;
  bool is_late(Tracked& weight);
  bool is_edited(const Tracked& weight);
  void notify_before_write();
  void copy_to_shard(const Tracked& weight);

  Context& context_;
  ShardAccess& access_;
  Gatherer& gatherer_;
  UnshardedCache& unsharded_cache_;
  GatheredStorages storages_;
  std::vector<Tracked> tracked_;
  std::string before_write_op_;
  std::vector<Tracked> outdated_;  // still referenced, although their shards have changed
};

}  // namespace lightning_zero
