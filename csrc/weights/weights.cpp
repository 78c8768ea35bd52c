#include "weights/weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_maximum.h>

#include "gradients/grad_aliasing.h"
#include "torch_compat.h"

namespace lightning_zero {

Weights::Weights(Context& context, Transports& transports, Communicators& comms)
    : context_(context),
      compute_shards_(context),
      host_shards_(context.exchanges_weights() ? std::make_unique<HostShards>(context, comms) : nullptr),
      access_(context, comms.gathers(), compute_shards_, host_shards_.get(), [this] { prefetcher_.drop(); }),
      gatherer_(context, transports.make_gathers(access_)),
      prefetcher_(context, gatherer_),
      unsharded_cache_(context, access_, gatherer_),
      user_writes_(context, access_, gatherer_, unsharded_cache_) {}

void Weights::sync_edits_if_any() {
  // A capture would repeat the copies; before_replay() makes them.
  if (user_writes_.watched() > 0 && !compute_shards_.recording)
    user_writes_.sync(/*forget=*/false);
}

// ---- ops

at::Tensor Weights::gather(int64_t index, at::IntArrayRef shape, at::ScalarType dtype, bool tracked) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  const bool recording = compute_shards_.recording;
  if (!recording)
    user_writes_.sync(/*forget=*/false);
  // A weight that is read while eager code still holds it has the same memory, as in a plain module. With two
  // copies, the unmodified one would undo writes to the other. It is gathered anyway, because ranks may hold
  // weights for different times.
  // A replay would write into memory that is freed by then.
  auto* tracked_weight = tracked && !recording ? user_writes_.find_tracked(index, dtype) : nullptr;
  auto flat = tracked_weight != nullptr ? tracked_weight->flat : at::Tensor();
  {
    // The values are the same, so autograd must not count this as a write to the tensor.
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> sources;
    if (!unsharded_cache_.read(record, dtype, flat)) {
      note(tracked ? GatherLog::Kind::EAGER : GatherLog::Kind::SINGLE, dtype, {&record});
      if (tracked && !access_.uses_epoch_lock())
        context_.record_read(index);
      gatherer_.gather(record, dtype, flat, sources).wait(context_.device);
    }
  }
  if (!tracked)
    return as_parameter(flat, record.numel, shape);
  auto full = as_parameter(flat, record);
  context_.count("eager_gathers");
  user_writes_.track(tracked_weight, flat, full, record);
  return full;
}

at::Tensor Weights::gather_start(int64_t index, at::IntArrayRef shape, at::ScalarType dtype) {
  Lock lock(context_.mutex);
  sync_edits_if_any();
  auto& record = context_.at(index);
  note(GatherLog::Kind::SINGLE, dtype, {&record});
  record.gathered_in.insert(dtype);
  at::Tensor flat;
  std::vector<at::Tensor> sources{record.shard};
  auto pending = gatherer_.gather(record, dtype, flat, sources);
  auto full = as_parameter(flat, record.numel, shape);
  register_pending(full, std::move(pending), std::move(sources), context_.device);
  return full;
}

at::Tensor Weights::gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel) {
  Lock lock(context_.mutex);
  sync_edits_if_any();
  std::vector<ParamRecord*> records;
  for (const auto& shard : shards)
    records.push_back(&context_.at(ShardTable::instance().find(shard, "gather_group").index));
  context_.set_last_parameter(*records.front());
  context_.count("gathers", static_cast<int64_t>(shards.size()));
  context_.count("gather_bytes", numel * static_cast<int64_t>(c10::elementSize(dtype)));
  context_.count("gather_groups");
  note(GatherLog::Kind::GROUP, dtype, records, numel);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (auto waiting = prefetcher_.take(records, dtype, numel); waiting.defined())
    return waiting;
  std::vector<at::Tensor> sources;
  auto started = start_gather(gatherer_, {std::move(records), dtype, numel}, sources);
  register_pending(started.buffer, std::move(started.pending), std::move(sources), context_.device);
  return started.buffer;
}

at::Tensor Weights::view(int64_t index, at::IntArrayRef shape, at::ScalarType dtype) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(context_.shards() == 1, "the shard of ", record.name, " is not the whole weight");
  sync_edits_if_any();
  record.gathered_in.insert(dtype);
  if (grad_aliasing::may_view(record)) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    if (const auto flat = access_.local_source(record, dtype); flat.defined()) {
      context_.set_last_parameter(record);
      grad_aliasing::note_view(record);
      return as_parameter(flat, record.numel, shape);
    }
  } else {
    ++context_.reads_of_gradients;
  }
  return gather(index, shape, dtype, /*tracked=*/false);
}

at::Tensor Weights::fp8_factor(int64_t index) const {
  Lock lock(context_.mutex);
  const auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(record.fp8_factor.defined(), record.name, " has no factor for fp8");
  return record.fp8_factor.clone();
}

void Weights::note_fp8_health(int64_t index, int64_t matrix, at::TensorList numbers) const {
  Lock lock(context_.mutex);
  const auto& memory = context_.at(index).fp8_health;
  if (!memory.defined())
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto largest = memory.select(0, matrix).narrow(0, 0, static_cast<int64_t>(numbers.size())).unbind();
  at::_foreach_maximum_(largest, numbers);  // NaN stays
}

void Weights::cached_gather_start(at::TensorList cache, at::TensorList shards) {
  Lock lock(context_.mutex);
  sync_edits_if_any();
  if (!access_.uses_epoch_lock()) {
    std::vector<ParamRecord*> records;
    for (const auto& shard : shards)
      records.push_back(&context_.at(ShardTable::instance().find(shard, "cached_gather_start").index));
    note(GatherLog::Kind::CACHED, at::kFloat, records);
  }
  unsharded_cache_.start(cache, shards);
}

void Weights::check_plan(const std::string& digest, const std::string& plan) {
  std::unique_lock lock(context_.mutex);
  if (compute_shards_.recording)
    return;  // before_replay() does this for each replay
  if (plans_.count(digest) == 0 && !new_plan_op_.empty()) {
    lock.unlock();  // Python waits there for other ranks
    compat::call(new_plan_op_, {digest, plan});
    lock.lock();
    plans_.insert(digest);
  }
  sync_edits_if_any();  // graphs on one rank may read shards without a gather
  if (!access_.is_shared())
    return;
  note(GatherLog::Kind::GRAPH, at::kFloat, {});
  prefetcher_.begin_graph();
  access_.publish(/*all=*/false);
}

// ---- changes of shards

void Weights::begin_writing(bool stepping) {
  Lock lock(context_.mutex);
  if (!stepping)
    ++context_.user_write_count;
  if (!access_.uses_epoch_lock())
    return access_.expire();
  if (!access_.is_writing())
    user_writes_.apply_with_epoch_lock();
  access_.begin_write_epoch();
}

void Weights::end_writing() {
  Lock lock(context_.mutex);
  access_.end_writing();
}

void Weights::expire_compute_shards() {
  Lock lock(context_.mutex);
  access_.expire_on_single_host();
}

void Weights::refresh_compute_shards() {
  Lock lock(context_.mutex);
  prefetcher_.drop();
  if (!compute_shards_.has_memory() && !access_.is_shared())
    return;
  if (compute_shards_.any_unclaimed_gradient())
    begin_writing(/*stepping=*/true);  // all ranks do, unless reads are collective
  access_.publish(/*all=*/true);
  prefetcher_.begin_step(/*noting=*/access_.is_published());
}

bool Weights::sync_compute_shards(bool ahead) {
  Lock lock(context_.mutex);
  if (ahead && !(access_.is_shared() && (access_.uses_epoch_lock() || context_.exchanges_weights()))) {
    if (!access_.is_shared() && !context_.exchanges_weights()) {
      sync_edits_if_any();
      access_.publish(/*all=*/false);  // a capture must find no stale compute shards
    }
    return false;
  }
  sync_edits_if_any();
  prefetcher_.drop();
  if (ahead)
    access_.publish_before_capture();
  else
    access_.publish(/*all=*/false, /*wait=*/true);
  return true;
}

std::vector<int64_t> Weights::gathered_in(at::ScalarType dtype) const {
  Lock lock(context_.mutex);
  std::vector<int64_t> found;
  for (const auto& record : context_.records) {
    if (record->live && record->gathered_in.count(dtype) > 0)
      found.push_back(record->index);
  }
  return found;
}

// ---- a rank without gradients

void Weights::note(GatherLog::Kind kind, at::ScalarType dtype, const std::vector<ParamRecord*>& records,
                   int64_t numel) {
  if (access_.uses_epoch_lock() || context_.size == 1)
    return;  // a gather needs no other rank
  GatherLog::Entry entry{kind, dtype, {}, numel};
  for (const auto* record : records) entry.indices.push_back(record->index);
  log_.note(std::move(entry));
}

void Weights::repeat_gathers() {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (const auto& entry : log_.missing()) repeat(entry);
  log_.end_skipped();
}

void Weights::repeat(const GatherLog::Entry& entry) {
  std::vector<ParamRecord*> records;
  std::vector<at::Tensor> sources;
  for (const auto index : entry.indices) records.push_back(&context_.at(index));
  switch (entry.kind) {
    case GatherLog::Kind::EAGER:
      context_.record_read(entry.indices.front());
      [[fallthrough]];
    case GatherLog::Kind::SINGLE: {
      at::Tensor flat;
      gatherer_.gather(*records.front(), entry.dtype, flat, sources).wait(context_.device);
      return;
    }
    case GatherLog::Kind::GROUP:
      start_gather(gatherer_, {std::move(records), entry.dtype, entry.numel}, sources)
          .pending.wait(context_.device);
      return;
    case GatherLog::Kind::CACHED: {
      std::vector<at::Tensor> cache, shards;
      for (const auto* record : records) {
        cache.push_back(record->cached.memory);
        shards.push_back(record->shard);
      }
      unsharded_cache_.start(cache, shards);
      unsharded_cache_.wait(shards);
      return;
    }
    case GatherLog::Kind::GRAPH:
      access_.publish(/*all=*/false);
      return;
  }
}

void Weights::close() {
  user_writes_.close();
  unsharded_cache_.close();
  prefetcher_.forget();
  compute_shards_.close();
  access_.close();
}

}  // namespace lightning_zero
