// The Executor's side of weights: all-gathers, shadows, edits of gathered weights. See executor.h.
#include "executor.h"

#include <ATen/ATen.h>
#include <c10/core/impl/COW.h>

#include <algorithm>

namespace lightning_zero {

namespace {

at::Tensor as_parameter(const at::Tensor& flat, int64_t numel, at::IntArrayRef shape) {
  return flat.narrow(0, 0, numel).view(shape);
}

// The same for code that is not compiled, which sees the weight's own dimensions however they lie in memory.
at::Tensor as_parameter(const at::Tensor& flat, const ParamRecord& record) {
  std::vector<int64_t> stored, inverse(record.order.size());
  for (size_t i = 0; i < record.order.size(); ++i) {
    stored.push_back(record.shape[record.order[i]]);
    inverse[record.order[i]] = static_cast<int64_t>(i);
  }
  auto full = as_parameter(flat, record.numel, stored);
  return std::is_sorted(inverse.begin(), inverse.end()) ? full : full.permute(inverse);
}

// Marks memory that nobody has written to since; see [Note: turns]. Memory of another make is not marked.
void mark(const at::Tensor& flat) {
  auto& storage = *flat.storage().unsafeGetStorageImpl();
  if (c10::impl::cow::has_simple_data_ptr(storage))
    c10::impl::cow::lazy_clone_storage(storage);  // the clone goes at once
}

bool is_marked(const at::Tensor& flat) {
  return c10::impl::cow::is_cow_data_ptr(flat.storage().data_ptr());
}

}  // namespace

at::Tensor Executor::fresh(int64_t numel, const at::TensorOptions& options) {
  auto memory = at::empty({numel}, options);
  if (!options_.poison)
    return memory;
  // Poisoned again before it goes back to the allocator.
  return at::from_blob(
      memory.mutable_data_ptr(), {numel}, [memory](void*) { fill_with_poison(memory); }, options);
}

at::Tensor Executor::allocate(const ParamRecord& record, at::ScalarType dtype, at::Tensor output) {
  if (!output.defined())
    output = fresh(size() * record.shard_numel(), record.shard.options().dtype(dtype));
  count("gathers");
  count("gather_bytes", static_cast<int64_t>(output.nbytes()));
  return output;
}

at::Tensor Executor::source_in(ParamRecord& record, at::ScalarType dtype) {
  if (record.shard.scalar_type() == dtype)
    return record.shard;
  if (!record.shadow.defined() || record.shadow.scalar_type() != dtype)
    return {};
  if (is_stale(record)) {
    if (!record.peers.empty())
      return {};  // a peer may be reading it
    write_shadow(record);
  }
  return record.shadow;
}

at::Tensor Executor::gather_into(ParamRecord& record, at::ScalarType dtype, Pending& pending,
                                 at::Tensor output) {
  output = allocate(record, dtype, std::move(output));
  touch(record);
  if (can_read({&record})) {
    pending = read({&record}, {output});
    return output;
  }
  const auto source = source_in(record, dtype);
  pending = source.defined() ? gather_comm_.all_gather(output, source)
                             : gather_comm_.all_gather(output, record.shard, dtype);
  return output;
}

at::Tensor Executor::gather(int64_t index, at::IntArrayRef shape, at::ScalarType dtype, bool tracked) {
  std::lock_guard lock(mutex_);
  auto& record = at(index);
  sync_edits(/*forget=*/false);
  // A weight that is read while it is still held is the same memory, as in a plain module: of two copies, the
  // one that nobody edited would undo the edits of the other. It is gathered all the same, since ranks may
  // hold weights for different times.
  const auto held = std::find_if(tracked_.begin(), tracked_.end(), [&](const Tracked& other) {
    return tracked && other.index == index && other.flat.scalar_type() == dtype &&
           other.flat.is_inference() == c10::InferenceMode::is_enabled();
  });
  const bool again = held != tracked_.end();
  Pending pending;
  at::Tensor flat;
  {
    // The same values again: autograd must not take them for an edit of the weight that was read first.
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    flat = gather_into(record, dtype, pending, again ? held->flat : at::Tensor());
    pending.wait(device_);
  }
  if (!tracked)
    return as_parameter(flat, record.numel, shape);
  auto full = as_parameter(flat, record);
  count("eager_gathers");
  gathered_.add(full, index);
  if (again) {
    held->given.push_back(full);
  } else if (dtype == record.shard.scalar_type()) {
    tracked_.push_back({flat, index, static_cast<uint32_t>(record.param._version()), {full}});
  }
  if (turns_)
    mark(flat);
  return full;
}

at::Tensor Executor::gather_start(int64_t index, at::IntArrayRef shape, at::ScalarType dtype) {
  std::lock_guard lock(mutex_);
  if (!tracked_.empty())
    sync_edits(/*forget=*/false);
  auto& record = at(index);
  Pending pending;
  auto flat = gather_into(record, dtype, pending);
  auto full = as_parameter(flat, record.numel, shape);
  c10d::register_work(full, c10::make_intrusive<PendingWork>(std::move(pending),
                                                             std::vector<at::Tensor>{record.shard}, device_));
  return full;
}

at::Tensor Executor::gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel) {
  std::lock_guard lock(mutex_);
  if (!tracked_.empty())
    sync_edits(/*forget=*/false);
  std::vector<ParamRecord*> records;
  for (const auto& shard : shards)
    records.push_back(&at(ShardTable::instance().find(shard, "gather_group").index));
  touch(*records.front());
  count("gathers", static_cast<int64_t>(shards.size()));
  count("gather_bytes", numel * static_cast<int64_t>(c10::elementSize(dtype)));
  count("gather_groups");
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (auto waiting = take_ahead(records, dtype, numel); waiting.defined())
    return waiting;
  std::vector<at::Tensor> sources;
  auto started = start({std::move(records), dtype, numel}, sources);
  c10d::register_work(started.buffer, c10::make_intrusive<PendingWork>(std::move(started.pending),
                                                                       std::move(sources), device_));
  return started.buffer;
}

bool Executor::is_kept(const ParamRecord& record) const {
  return record.kept_epoch == epoch_ && record.kept_version == static_cast<int64_t>(record.param._version());
}

void Executor::keep(ParamRecord& record) {
  record.kept_epoch = epoch_;
  record.kept_version = static_cast<int64_t>(record.param._version());
}

void Executor::keep_start(at::TensorList kept, at::TensorList shards) {
  std::lock_guard lock(mutex_);
  if (!tracked_.empty())
    sync_edits(/*forget=*/false);
  std::vector<ParamRecord*> records;
  bool stale = false;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& record = at(ShardTable::instance().find(shards[i], "keep_start").index);
    TORCH_INTERNAL_ASSERT(record.kept.defined() && record.kept.const_data_ptr() == kept[i].const_data_ptr(),
                          record.name);
    // The same on every rank: whether a weight is gathered must not depend on what one of them happens to
    // hold.
    stale = stale || !is_kept(record);
    records.push_back(&record);
  }
  if (recording_) {
    auto& noted = stale ? recording_->graph.kept : recording_->graph.kept_before;
    for (const auto* record : records) noted.push_back(record->index);
  }
  if (!stale)
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto arriving = std::make_shared<Arriving>();
  std::vector<at::Tensor> outputs;
  int64_t bytes = 0;
  for (auto* record : records) {
    outputs.push_back(record->kept);
    bytes += static_cast<int64_t>(record->kept.nbytes());
    keep(*record);
  }
  count("gathers", static_cast<int64_t>(records.size()));
  count("gather_bytes", bytes);
  count("kept_gathers", static_cast<int64_t>(records.size()));
  arriving->pending = fetch(records, std::move(outputs), arriving->sources);
  for (auto* record : records) arriving_[record->index] = arriving;
}

void Executor::keep_wait(at::TensorList shards) {
  std::lock_guard lock(mutex_);
  if (arriving_.empty())
    return;
  for (const auto& shard : shards) {
    const auto found = arriving_.find(ShardTable::instance().find(shard, "keep_wait").index);
    if (found == arriving_.end())
      continue;
    found->second->pending.wait(device_);
    arriving_.erase(found);
  }
}

bool Executor::Tracked::held() {
  // A tensor that Python has seen is kept alive, with its Python object, by our reference: let go of it for a
  // moment to see who else holds it.
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> seen;
  for (const auto& tensor : given) seen.emplace_back(tensor.getIntrusivePtr());
  given.clear();
  const bool viewed = flat.storage().use_count() > 1;
  for (const auto& weak : seen) {
    if (auto impl = weak.lock())
      given.emplace_back(std::move(impl));
  }
  return viewed || !given.empty();
}

uint64_t Executor::Tracked::edits_seen() const {
  uint64_t edits = 0;
  for (const auto& tensor : given) {
    if (!tensor.is_inference())
      edits += tensor._version();
    if (!tensor.is_alias_of(flat))
      ++edits;
  }
  return edits;
}

// `module.weight.data = x` gives the tensor that was read other memory; its values belong into the shard, and
// the tensor back to where edits are seen.
void Executor::take_assigned(Tracked& weight) {
  const auto& record = at(weight.index);
  for (auto& tensor : weight.given) {
    if (tensor.is_alias_of(weight.flat))
      continue;
    TORCH_CHECK_VALUE(
        tensor.sizes() == at::IntArrayRef(record.shape) && tensor.scalar_type() == weight.flat.scalar_type(),
        "lightning_zero: ", record.name, ".data was given a tensor of shape ", tensor.sizes(), " and dtype ",
        tensor.scalar_type(), ", but a sharded parameter keeps its shape ", at::IntArrayRef(record.shape),
        " and dtype ", weight.flat.scalar_type(), ". Call lightning_zero.unshard(module) to change them.");
    auto own = as_parameter(weight.flat, record);
    own.copy_(tensor);
    tensor.set_data(own);
  }
}

void Executor::refuse_late_edits() {
  for (auto it = outdated_.begin(); it != outdated_.end();) {
    const auto name = at(it->index).name;
    const bool late = it->edits_seen() != it->edits;
    it = late || !it->held() ? outdated_.erase(it) : it + 1;
    TORCH_CHECK(!late, "lightning_zero: a tensor that was read from ", name,
                " before an optimizer step, or before the parameter was loaded, was "
                "edited after it. The edit cannot reach the parameter any more. Read module.weight again "
                "before editing it.");
  }
}

void Executor::copy_edit(const Tracked& weight) {
  auto& record = at(weight.index);
  const auto width = record.shard_numel(), begin = rank() * width;
  const auto valid = std::clamp<int64_t>(record.numel - begin, 0, width);
  if (valid > 0)
    record.shard.narrow(0, 0, valid).copy_(weight.flat.narrow(0, begin, valid));
  record.shadow_epoch = -1;
}

// Whether its values are others than those of the shards. While shards are written nobody can tell, and it
// does not matter for whose turn it is.
bool Executor::is_edited(const Tracked& weight) {
  auto& record = at(weight.index);
  if (turns_->writing() || !can_read({&record}))
    return true;
  auto now = at::empty({weight.flat.numel()}, weight.flat.options());
  read({&record}, {now}).wait(device_);
  const auto numel = record.numel;
  // Bit by bit: NaN is no edit.
  return !at::equal(now.narrow(0, 0, numel).view(at::kByte), weight.flat.narrow(0, 0, numel).view(at::kByte));
}

// Where ranks take turns, edits are a turn to write, and weights that nobody edited must not begin one.
void Executor::take_edits() {
  std::vector<Tracked*> edited;
  for (auto& weight : tracked_) {
    if (at(weight.index).param._version() != weight.version)
      continue;
    take_assigned(weight);
    if (is_marked(weight.flat))
      continue;
    if (is_edited(weight))
      edited.push_back(&weight);
    else
      mark(weight.flat);
  }
  if (edited.empty())
    return;
  begin_turn_to_write();
  for (const auto* weight : edited) {
    copy_edit(*weight);
    mark(weight->flat);
  }
}

void Executor::sync_edits(bool forget) {
  std::lock_guard lock(mutex_);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  refuse_late_edits();
  if (turns_)
    take_edits();
  for (auto it = tracked_.begin(); it != tracked_.end();) {
    auto& record = at(it->index);
    // A newer parameter (an optimizer step, a loaded state) wins over a copy taken before it.
    const bool current = record.param._version() == it->version;
    if (current && !turns_) {
      take_assigned(*it);
      copy_edit(*it);
    }
    const bool held = it->held();
    if (held && (forget || !current)) {
      it->edits = it->edits_seen();
      outdated_.push_back(std::move(*it));
    }
    it = (forget || !current || !held) ? tracked_.erase(it) : it + 1;
  }
}

void Executor::drop_weights() {
  std::lock_guard lock(mutex_);
  tracked_.clear();
  outdated_.clear();
}

int64_t Executor::gradients_key() const {
  std::lock_guard lock(mutex_);
  uint64_t key = 14695981039346656037ULL;
  for (const auto& record : records_) {
    TORCH_CHECK_VALUE(!record->live || record->param.const_data_ptr() == record->shard.const_data_ptr(),
                      "lightning_zero: the data of parameter ", record->name,
                      " was replaced by another tensor, which neither gathers nor optimizer steps would see. "
                      "Copy into it instead (param.data.copy_(x)), or assign to module.weight.data.");
    const auto& grad = record->param.grad();
    key =
        (key ^ (grad.defined() ? reinterpret_cast<uintptr_t>(grad.const_data_ptr()) : 0)) * 1099511628211ULL;
  }
  return static_cast<int64_t>(key);
}

int64_t Executor::find_gathered(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  return gathered_.find(tensor);
}

}  // namespace lightning_zero
