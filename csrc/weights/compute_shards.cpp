#include "weights/compute_shards.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "gradients/grad_aliasing.h"
#include "tensor_ops.h"

namespace lightning_zero {

void ComputeShards::add_memory(at::Tensor copies, at::Tensor shards) {
  TORCH_INTERNAL_ASSERT(copies.numel() == shards.numel());
  memory_.emplace_back(std::move(copies), std::move(shards));
}

bool ComputeShards::has_memory() const {
  return !memory_.empty() ||
         std::any_of(context_.records.begin(), context_.records.end(),
                     [](const auto& record) { return record->compute_shard.written_by_optimizer; });
}

Stamp ComputeShards::now(const ParamRecord& record) const {
  return record.stamp(record.compute_shard.written_by_optimizer ? context_.user_write_count
                                                                : context_.shard_version);
}

bool ComputeShards::is_stale(const ParamRecord& record) const {
  const auto& copy = record.compute_shard;
  return grad_aliasing::may_write(record) &&
         (copy.state != ComputeShardState::WEIGHT || copy.written != now(record));
}

bool ComputeShards::any_unclaimed_gradient() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [](const auto& record) {
    return record->compute_shard.state != ComputeShardState::WEIGHT && grad_aliasing::may_write(*record);
  });
}

void ComputeShards::is_written(ParamRecord& record) {
  record.compute_shard.written = now(record);
  record.compute_shard.state = ComputeShardState::WEIGHT;
}

std::vector<ParamRecord*> ComputeShards::stale(bool all) const {
  std::vector<ParamRecord*> found;
  for (auto& record : context_.records) {
    const bool wanted = all ? grad_aliasing::may_write(*record) : is_stale(*record);
    if (record->compute_shard.local.defined() && wanted)
      found.push_back(record.get());
  }
  return found;
}

void ComputeShards::write(ParamRecord& record) {
  TORCH_INTERNAL_ASSERT(!recording, "a replay would write the compute shard of ", record.name, " each time");
  at::NoGradGuard no_grad;
  record.compute_shard.local.copy_(record.shard);
  is_written(record);
  context_.count("compute_shard_writes");
}

bool ComputeShards::is_left_alone(const ParamRecord& record) const {
  const auto& copy = record.compute_shard;
  return !copy.local.defined() || !grad_aliasing::may_write(record) ||
         (copy.written_by_optimizer && !is_stale(record));
}

void ComputeShards::write_all() {
  std::vector<ParamRecord*> wanted;
  for (auto& record : context_.records) {
    if (!is_left_alone(*record))
      wanted.push_back(record.get());
  }
  const auto on_device = [](const auto* record) { return !record->on_host; };
  // One kernel writes them all, if no memory holds a gradient.
  const bool all = std::all_of(context_.records.begin(), context_.records.end(),
                               [](const auto& record) { return grad_aliasing::may_write(*record); }) &&
                   std::any_of(wanted.begin(), wanted.end(), on_device);
  if (all) {
    std::vector<at::Tensor> to, from;
    for (auto& [copies, shards] : memory_) {
      to.push_back(copies);
      from.push_back(shards);
    }
    if (!to.empty()) {
      tensors::copy_each(to, from);
      context_.count("compute_shard_passes");
    }
  }
  for (auto* record : wanted) {
    if (all && on_device(record))
      is_written(*record);
    else
      write(*record);
  }
}

std::vector<int64_t> ComputeShards::valid_indices() const {
  Lock lock(context_.mutex);
  std::vector<int64_t> found;
  for (const auto& record : context_.records) {
    const auto& copy = record->compute_shard;
    if (copy.written_by_optimizer && copy.local.defined() && copy.state == ComputeShardState::WEIGHT &&
        !is_stale(*record))
      found.push_back(record->index);
  }
  return found;
}

void ComputeShards::mark_compute_shards_written(std::vector<int64_t> indices, bool written) {
  Lock lock(context_.mutex);
  for (const auto index : indices) {
    auto& record = context_.at(index);
    auto& copy = record.compute_shard;
    TORCH_INTERNAL_ASSERT(copy.local.defined(), record.name);
    copy.written_by_optimizer = copy.written_by_optimizer || written;
    if (written)
      is_written(record);
    else
      copy.written = {};
  }
}

void ComputeShards::write_full_precision(const std::vector<ParamRecord*>& records) {
  std::vector<at::Tensor> copies, shards;
  for (auto* record : records) {
    if (record->full_precision_shard.local.defined()) {
      copies.push_back(record->full_precision_shard.local);
      shards.push_back(record->shard);
    }
  }
  if (!copies.empty())
    tensors::copy_each(copies, shards);
}

at::Tensor ComputeShards::fp8_source(ParamRecord& record) {
  auto& copy = record.fp8_shard;
  if (copy.local.defined() && copy.written != record.stamp(context_.shard_version)) {
    TORCH_INTERNAL_ASSERT(!recording, "a replay would write the fp8 shard of ", record.name, " each time");
    at::NoGradGuard no_grad;
    copy.local.copy_(record.cast(record.shard, at::kFloat8_e4m3fn));
    copy.written = record.stamp(context_.shard_version);
    context_.count("fp8_shard_writes");
  }
  return copy.local;
}

void ComputeShards::write_stale_fp8() {
  for (auto& record : context_.records) fp8_source(*record);
}

void ComputeShards::mark_fp8_shards_written() {
  Lock lock(context_.mutex);
  for (auto& record : context_.records) record->fp8_shard.written = record->stamp(context_.shard_version);
}

void ShardAccess::set_epoch_lock(std::unique_ptr<EpochLock> epoch_lock) {
  TORCH_INTERNAL_ASSERT(!epoch_lock_);
  epoch_lock_ = std::move(epoch_lock);
}

void ShardAccess::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  if (epoch_lock_)
    epoch_lock_->watch(watchdog);
}

at::Tensor ShardAccess::local_source(ParamRecord& record, at::ScalarType dtype) {
  if (host_shards_ != nullptr) {
    const auto& copy =
        record.shard.scalar_type() == dtype ? record.full_precision_shard : record.compute_shard;
    const bool serves = published_ && copy.local.defined() && copy.local.scalar_type() == dtype;
    return serves ? copy.local : at::Tensor();
  }
  if (record.shard.scalar_type() == dtype)
    return record.shard;
  if (dtype == at::kFloat8_e4m3fn)
    return compute_shards_.fp8_source(record);
  const auto& copy = record.compute_shard;
  if (!copy.local.defined() || copy.local.scalar_type() != dtype)
    return {};
  if (compute_shards_.is_stale(record)) {
    if (!copy.by_rank.empty())
      return {};  // a peer may be reading it
    compute_shards_.write(record);
  }
  if (copy.state == ComputeShardState::WEIGHT)
    return copy.local;
  ++context_.reads_of_gradients;
  return {};
}

void ShardAccess::begin_write_epoch() {
  if (epoch_lock_->is_writing())
    return;
  ++context_.shard_version;
  published_ = false;
  on_change_();
  epoch_lock_->begin_writing();
}

void ShardAccess::end_writing() {
  if (!epoch_lock_ || !epoch_lock_->is_writing())
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  compute_shards_.write_all();
  compute_shards_.write_stale_fp8();
  epoch_lock_->end_writing();
}

void ShardAccess::begin_reading() {
  end_writing();
  epoch_lock_->wait_to_read();
  published_ = true;
}

void ShardAccess::begin_step(int64_t step) {
  if (!epoch_lock_)
    return;
  end_writing();
  epoch_lock_->begin_step(step);
}

void ShardAccess::expire() {
  if (epoch_lock_)
    return;
  ++context_.shard_version;
  published_ = false;
  on_change_();
}

void ShardAccess::expire_on_single_host() {
  if (host_shards_ == nullptr)
    expire();
}

void ShardAccess::close() {
  epoch_lock_.reset();
  if (host_shards_ != nullptr)
    host_shards_->exchange().close();
}

void ShardAccess::publish(bool all, bool wait) {
  if (!epoch_lock_)
    return publish_compute_shards(all, wait);
  begin_reading();
  if (wait)
    comm_.block_current_stream();
}

void ShardAccess::publish_before_capture() {
  publish(/*all=*/false, /*wait=*/true);
  published_before_capture_ = host_shards_ != nullptr && host_shards_->any();
}

void ShardAccess::wait_for_shard(ParamRecord& record, at::ScalarType dtype, bool from_peers) {
  if (host_shards_ != nullptr)
    host_shards_->exchange().wait_until_readable(host_shards_->read(record, dtype, /*compiled=*/true),
                                                 Reader::GATHERS, from_peers);
}

void ShardAccess::wait_for_cached(ParamRecord& record, bool compiled) {
  const auto dtype = record.cached.memory.scalar_type();
  host_shards_->exchange().wait_until_readable(host_shards_->read(record, dtype, compiled), Reader::CURRENT,
                                               /*from_peers=*/false);
}

void ShardAccess::publish_host_shards(bool wait) {
  if (!host_shards_->any())
    return;  // no rank reads any, and a rank that runs a graph which this rank replays would not ask
  const bool stale = !published_ || host_shards_->any_stale();
  if (std::exchange(published_before_capture_, false) && !stale)
    return;
  auto& exchange = host_shards_->exchange();
  if (host_shards_->on_any_rank(stale)) {
    on_change_();
    exchange.end();
    comm_.barrier().wait(context_.device);  // all ranks have read
    host_shards_->refresh();
  }
  if (wait)
    comm_.block_current_stream();
  if (wait && !exchange.in_graphs())
    exchange.end();
  published_ = true;
}

void ShardAccess::publish_compute_shards(bool all, bool wait) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (host_shards_ != nullptr)
    return publish_host_shards(wait);  // changes are announced
  const auto stale = compute_shards_.stale(all);
  if (!stale.empty())
    on_change_();
  // All ranks join the barrier, even if this rank has nothing to write.
  if (shared_) {
    auto all_have_read = comm_.barrier();
    if (!stale.empty() || !has_streams(context_.device))
      all_have_read.wait(context_.device);
  }
  if (all) {
    compute_shards_.write_all();
  } else {
    for (auto* record : stale) compute_shards_.write(*record);
    compute_shards_.write_stale_fp8();
  }
  if (!shared_)
    return;
  compute_shards_.write_full_precision(stale);
  auto all_have_written = comm_.barrier();
  if (wait || !has_streams(context_.device))
    all_have_written.wait(context_.device);
  published_ = true;
}

}  // namespace lightning_zero
