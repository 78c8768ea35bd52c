// Which parameter a gathered weight is of.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "context.h"
#include "weights/compute_shards.h"
#include "weights/gather.h"
#include "weights/resident.h"

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

// Weights that eager code was given, and what it does to them: edits reach shards.

class UserWrites {
 public:
  UserWrites(Context& context, ShardAccess& access, Gatherer& gatherer, ResidentWeights& resident)
      : context_(context), access_(access), gatherer_(gatherer), resident_(resident) {}

  // A weight that eager code was given.
  struct Tracked {
    at::Tensor flat;  // 1-D, padded
    int64_t index;
    uint32_t version;  // of the parameter when it was gathered
    // What code was given: views of `flat`, until somebody assigns other memory to one's `data`.
    std::vector<at::Tensor> views;
    uint64_t writes = 0;  // edits_seen() when its shard changed, after which edits come too late
    at::Tensor before;    // this rank's elements at that time
    bool is_held();
    uint64_t write_count() const;
  };

  // How many weights are watched.
  size_t watched() const { return tracked_.size(); }
  // Name of an op `() -> ()` that is called before edits change shards: a save beside training may be copying
  // them. Not for weights that nobody can have written to: a forward reads them, and is not to wait for that.
  void set_before_write_op(std::string op) { before_write_op_ = std::move(op); }
  // What code holds of this parameter in this dtype; null when it holds nothing.
  Tracked* find_tracked(int64_t index, at::ScalarType dtype);
  // Code is given `full`, a view of `flat`, which is what it held before, or new.
  void track(Tracked* before, const at::Tensor& flat, const at::Tensor& full, const ParamRecord& record);

  // Copies edits made to weights that eager code still holds, or held last, into their shards. `forget`: and
  // stop watching them, because the shards are about to change.
  void sync(bool forget);
  // Where ranks take turns, edits are a turn to write, and weights that nobody edited must not begin one.
  void apply_with_epoch_lock();
  // Lets go of all; edits to come of those that code still holds are not seen.
  void drop();
  // Parameter of which the tensor is a gathered weight, or a view of one; -1 when it is none.
  int64_t find_gathered(const at::Tensor& tensor);
  void close();

 private:
  void absorb_data_assignment(Tracked& weight);
  void raise_if_late();
  // This rank's elements of it, without padding: a view.
  at::Tensor own_part(const Tracked& weight) const;
  bool is_late(Tracked& weight);
  bool is_edited(const Tracked& weight);
  void notify_before_write();
  void copy_to_shard(const Tracked& weight);

  Context& context_;
  ShardAccess& access_;
  Gatherer& gatherer_;
  ResidentWeights& resident_;
  GatheredStorages storages_;
  std::vector<Tracked> tracked_;
  std::string before_write_op_;
  std::vector<Tracked> outdated_;  // still held although their shards have changed
};

}  // namespace lightning_zero
