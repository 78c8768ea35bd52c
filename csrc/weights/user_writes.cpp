#include "weights/user_writes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tensor_ops.h"
#include "torch_compat.h"

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

UserWrites::Tracked* UserWrites::find_tracked(int64_t index, at::ScalarType dtype) {
  const auto found = std::find_if(tracked_.begin(), tracked_.end(), [&](const Tracked& other) {
    return other.index == index && other.flat.scalar_type() == dtype &&
           other.flat.is_inference() == c10::InferenceMode::is_enabled();
  });
  return found == tracked_.end() ? nullptr : &*found;
}

void UserWrites::track(Tracked* before, const at::Tensor& flat, const at::Tensor& full,
                       const ParamRecord& record) {
  storages_.add(full, record.index);
  if (before != nullptr) {
    before->views.push_back(full);
  } else if (flat.scalar_type() == record.shard.scalar_type()) {
    tracked_.push_back({flat, record.index, static_cast<uint32_t>(record.param._version()), {full}});
  }
  compat::mark_copy_on_write(flat);
}

bool UserWrites::Tracked::is_held() {
  // Our reference keeps a tensor with its Python object alive. Drop it for a moment to see whether other
  // references exist.
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> seen;
  for (const auto& tensor : views) seen.emplace_back(tensor.getIntrusivePtr());
  views.clear();
  const bool viewed = flat.storage().use_count() > 1;
  for (const auto& weak : seen) {
    if (auto impl = weak.lock())
      views.emplace_back(std::move(impl));
  }
  return viewed || !views.empty();
}

uint64_t UserWrites::Tracked::write_count() const {
  uint64_t writes = 0;
  for (const auto& tensor : views) {
    if (!tensor.is_inference())
      writes += tensor._version();
    if (!tensor.is_alias_of(flat))
      ++writes;
  }
  return writes;
}

// `module.weight.data = x` gives the tensor other memory. Copy its values to the shard, and give the tensor
// new memory in which writes are noticed. Other references to the old memory (an earlier
// `module.weight.data`) keep their values, as in a plain module.
void UserWrites::absorb_data_assignment(Tracked& weight) {
  const auto& record = context_.at(weight.index);
  at::Tensor assigned;
  for (const auto& tensor : weight.views) {
    if (tensor.is_alias_of(weight.flat))
      continue;
    TORCH_CHECK_VALUE(
        tensor.sizes() == at::IntArrayRef(record.shape) && tensor.scalar_type() == weight.flat.scalar_type(),
        "lightning_zero: ", record.name, ".data was assigned a tensor of shape ", tensor.sizes(),
        " and dtype ", tensor.scalar_type(), ", but a sharded parameter keeps its shape ",
        at::IntArrayRef(record.shape), " and dtype ", weight.flat.scalar_type(),
        ". Call lightning_zero.unshard(module) to change them.");
    assigned = tensor;
  }
  if (!assigned.defined())
    return;
  weight.flat = tensors::empty(weight.flat.numel(), weight.flat.options()).zero_();
  auto own = as_parameter(weight.flat, record);
  own.copy_(assigned);
  for (auto& tensor : weight.views) tensor.set_data(own);
  storages_.add(own, weight.index);
}

at::Tensor UserWrites::own_part(const Tracked& weight) const {
  const auto& record = context_.at(weight.index);
  const auto width = record.shard_numel(), begin = std::min(context_.shard_number() * width, record.numel);
  return weight.flat.narrow(0, begin, std::min(width, record.numel - begin));
}

// Version counters miss writes through `.data` and through views whose base is gone. The copy-on-write mark
// detects them, but some readers remove it too, so the values decide. Each rank compares its own elements,
// since all ranks make equal writes.
bool UserWrites::is_late(Tracked& weight) {
  if (weight.write_count() != weight.writes)
    return true;
  if (compat::is_copy_on_write(weight.flat))
    return false;
  const auto now = own_part(weight);
  if (!tensors::equal(now.view(at::kByte), weight.before.view(at::kByte)))
    return true;
  compat::mark_copy_on_write(weight.flat);
  return false;
}

void UserWrites::raise_if_late() {
  for (auto it = outdated_.begin(); it != outdated_.end();) {
    const auto name = context_.at(it->index).name;
    const bool late = is_late(*it);
    it = late || !it->is_held() ? outdated_.erase(it) : it + 1;
    TORCH_CHECK(!late, "lightning_zero: a tensor that was read from ", name,
                " before an optimizer step, or before the parameter was loaded, was written to "
                "afterwards. The write can no longer reach the parameter. Read module.weight again "
                "before writing to it.");
  }
}

void UserWrites::notify_before_write() {
  if (!before_write_op_.empty())
    compat::call(before_write_op_);
}

void UserWrites::copy_to_shard(const Tracked& weight) {
  auto& record = context_.at(weight.index);
  const auto own = own_part(weight);
  if (own.numel() > 0)
    record.shard.narrow(0, 0, own.numel()).copy_(own);
  // Padding may be NaN: 8-bit state of a block with one NaN is NaN as a whole, and so is the next update.
  const auto padding = record.shard.numel() - own.numel();
  if (padding > 0 && !compat::is_copy_on_write(weight.flat))
    record.shard.narrow(0, own.numel(), padding).zero_();
  record.compute_shard.written = record.full_precision_shard.written = record.fp8_shard.written = {};
  if (record.compute_shard.written_by_optimizer)
    ++context_.user_write_count;
  unsharded_cache_.apply_user_write(record, weight.flat);
}

// Return true if the values differ from those of the shards. During a write epoch the shards cannot be
// compared, and the answer does not matter.
bool UserWrites::is_edited(const Tracked& weight) {
  auto& record = context_.at(weight.index);
  if (access_.is_writing())
    return true;
  auto now = tensors::empty(weight.flat.numel(), weight.flat.options());
  if (!gatherer_.gather_alone(record, now))
    return true;
  const auto numel = record.numel;
  // Compare bits, so that NaN is no write.
  return !tensors::equal(now.narrow(0, 0, numel).view(at::kByte),
                         weight.flat.narrow(0, 0, numel).view(at::kByte));
}

void UserWrites::apply_with_epoch_lock() {
  std::vector<Tracked*> edited;
  for (auto& weight : tracked_) {
    if (context_.at(weight.index).param._version() != weight.version)
      continue;
    absorb_data_assignment(weight);
    if (compat::is_copy_on_write(weight.flat))
      continue;
    if (is_edited(weight))
      edited.push_back(&weight);
    else
      compat::mark_copy_on_write(weight.flat);
  }
  if (edited.empty())
    return;
  notify_before_write();
  access_.begin_write_epoch();
  for (const auto* weight : edited) {
    copy_to_shard(*weight);
    compat::mark_copy_on_write(weight->flat);
  }
}

void UserWrites::sync(bool forget) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  raise_if_late();
  if (access_.uses_epoch_lock())
    apply_with_epoch_lock();
  for (auto it = tracked_.begin(); it != tracked_.end();) {
    auto& record = context_.at(it->index);
    // A newer parameter (an optimizer step, a loaded state) takes precedence over an older copy.
    const bool current = record.param._version() == it->version;
    if (current && !access_.uses_epoch_lock()) {
      absorb_data_assignment(*it);
      if (!compat::is_copy_on_write(it->flat))
        notify_before_write();
      copy_to_shard(*it);
      compat::mark_copy_on_write(it->flat);
    }
    const bool is_held = it->is_held();
    if (is_held && (forget || !current)) {
      it->writes = it->write_count();
      compat::mark_copy_on_write(it->flat);
      it->before = own_part(*it).clone();
      outdated_.push_back(std::move(*it));
    }
    it = (forget || !current || !is_held) ? tracked_.erase(it) : it + 1;
  }
}

int64_t UserWrites::find_gathered(const at::Tensor& tensor) {
  Lock lock(context_.mutex);
  return storages_.find(tensor);
}

void UserWrites::drop() {
  Lock lock(context_.mutex);
  tracked_.clear();
  outdated_.clear();
}

void UserWrites::close() {
  drop();
  storages_.clear();
}

}  // namespace lightning_zero
