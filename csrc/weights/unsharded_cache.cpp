#include "weights/unsharded_cache.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "torch_compat.h"

namespace lightning_zero {

bool UnshardedCache::is_filled(ParamRecord& record) const {
  if (const auto* host_shard = record.cached_host_shard())
    return host_shard->written == record.stamp(context_.shard_version);
  return record.cached.filled == record.stamp(context_.shard_version);
}

void UnshardedCache::note_filled(ParamRecord& record) const {
  if (auto* host_shard = record.cached_host_shard())
    host_shard->written = record.stamp(context_.shard_version);
  record.cached.filled = record.stamp(context_.shard_version);
}

void UnshardedCache::start(at::TensorList cache, at::TensorList shards) {
  std::vector<ParamRecord*> records;
  bool stale = false;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& record = context_.at(ShardTable::instance().find(shards[i], "cached_gather_start").index);
    TORCH_INTERNAL_ASSERT(
        record.cached.memory.defined() && record.cached.memory.const_data_ptr() == cache[i].const_data_ptr(),
        record.name);
    if (record.cached_host_shard() != nullptr)
      continue;  // all ranks exchanged it at the beginning of the graph
    // Ranks must decide alike, so the decision depends only on shared state.
    stale = stale || !is_filled(record);
    records.push_back(&record);
  }
  if (recording_) {
    auto& noted = stale ? recording_->gathered : recording_->found;
    for (const auto* record : records) noted.push_back(record->index);
  }
  if (!stale)
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto arriving = std::make_shared<PendingGather>();
  std::vector<at::Tensor> outputs;
  int64_t bytes = 0;
  for (auto* record : records) {
    outputs.push_back(record->cached.memory);
    bytes += static_cast<int64_t>(record->cached.memory.nbytes());
    note_filled(*record);
  }
  context_.count("gathers", static_cast<int64_t>(records.size()));
  context_.count("gather_bytes", bytes);
  context_.count("cached_gathers", static_cast<int64_t>(records.size()));
  arriving->pending = gatherer_.gather_group(records, std::move(outputs), arriving->sources);
  for (auto* record : records) pending_[record->index] = arriving;
}

void UnshardedCache::wait(at::TensorList shards) {
  Lock lock(context_.mutex);
  for (const auto& shard : shards) {
    const auto index = ShardTable::instance().find(shard, "cached_gather_wait").index;
    wait_for(index, /*compiled=*/true);
  }
}

void UnshardedCache::wait_for(int64_t index, bool compiled) {
  if (context_.at(index).cached_host_shard() != nullptr)
    return access_.wait_for_cached(context_.at(index), compiled);
  const auto found = pending_.find(index);
  if (found == pending_.end())
    return;
  found->second->pending.wait(context_.device);
  pending_.erase(found);
}

void UnshardedCache::serve_eager(bool on) {
  Lock lock(context_.mutex);
  serves_eager_ = on;
}

bool UnshardedCache::read(ParamRecord& record, at::ScalarType dtype, at::Tensor& flat) {
  auto& memory = record.cached.memory;
  if (!memory.defined() || memory.scalar_type() != dtype ||
      !(serves_eager_ || compat::current_backward() >= 0))
    return false;
  if (record.cached_host_shard() != nullptr || is_filled(record))
    wait_for(record.index, /*compiled=*/false);
  if (!is_filled(record)) {
    std::vector<at::Tensor> sources;
    note_filled(record);
    context_.count("cached_gathers");
    gatherer_.gather(record, dtype, memory, sources).wait(context_.device);
  }
  if (!flat.defined())
    flat = gatherer_.allocate(memory.numel(), memory.options());
  flat.copy_(memory);
  return true;
}

void UnshardedCache::apply_user_write(ParamRecord& record, const at::Tensor& flat) const {
  if (record.cached.memory.defined() && is_filled(record))
    record.cached.memory.copy_(flat);
}

UnshardedCache::Recorded UnshardedCache::end_recording() {
  pending_.clear();
  return std::exchange(recording_, {}).value();
}

void UnshardedCache::mark_not_run(const Recorded& graph) {
  for (const auto i : graph.gathered) context_.at(i).cached.filled = {};
}

bool UnshardedCache::has_inputs(const Recorded& graph, std::set<int64_t>& gathered) const {
  gathered.insert(graph.gathered.begin(), graph.gathered.end());
  return std::all_of(graph.found.begin(), graph.found.end(),
                     [&](int64_t i) { return is_filled(context_.at(i)) || gathered.count(i) > 0; });
}

void UnshardedCache::after_replay(const Recorded& graph) {
  for (const auto i : graph.gathered) note_filled(context_.at(i));
}

}  // namespace lightning_zero
