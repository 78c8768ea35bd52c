#include "weights/first_groups.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "runtime/compat.h"

namespace lightning_zero {

namespace {

// The weights that the first kernels read, and not so many that memory notices.
constexpr size_t kMaxPrefetchedGroups = 3;
constexpr int64_t kMaxPrefetchedBytes = 256 << 20;

}  // namespace

PendingGroup start_gather(Gatherer& gatherer, GatherGroup group, std::vector<at::Tensor>& sources) {
  auto buffer = gatherer.allocate(group.numel, group.records[0]->shard.options().dtype(group.dtype));
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  for (const auto* record : group.records) {
    outputs.push_back(piece(buffer, offset, gatherer.full_numel(*record)));
    offset += outputs.back().numel();
  }
  TORCH_INTERNAL_ASSERT(offset == group.numel, "a group of ", offset, " elements was planned as ",
                        group.numel);
  auto pending = gatherer.gather_group(group.records, std::move(outputs), sources);
  return {std::move(group), std::move(buffer), std::move(pending)};
}

void GroupPrefetcher::begin_step(bool recording) {
  recording_ = recording;
  for (auto& group : std::exchange(recorded_, {})) {
    if (!gatherer_.is_ready(group.records, group.dtype))
      break;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> sources;
    pending_.push_back(start_gather(gatherer_, std::move(group), sources));
  }
}

at::Tensor GroupPrefetcher::take(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel) {
  if (!gatherer_.is_ready(records, dtype))
    return {};
  GatherGroup group{records, dtype, numel};
  if (recording_) {
    int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    for (const auto& other : recorded_)
      bytes += other.numel * static_cast<int64_t>(c10::elementSize(other.dtype));
    recording_ = bytes <= kMaxPrefetchedBytes && recorded_.size() < kMaxPrefetchedGroups;
    if (recording_)
      recorded_.push_back(group);
  }
  if (pending_.empty())
    return {};
  if (!(pending_.front().group == group)) {
    drop();
    return {};
  }
  auto found = std::move(pending_.front());
  pending_.pop_front();
  context_.count("prefetched_groups");
  register_pending(found.buffer, std::move(found.pending), {}, context_.device);
  return found.buffer;
}

void GroupPrefetcher::drop() {
  // Their memory must not be given to somebody else while it is being written.
  for (auto& group : pending_) group.pending.wait(context_.device);
  pending_.clear();
}

void GroupPrefetcher::forget() {
  drop();
  recorded_.clear();
  recording_ = false;
}

}  // namespace lightning_zero
