#include "weights/first_groups.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "runtime/compat.h"

namespace lightning_zero {

namespace {

// The weights that the first kernels read, and not so many that memory notices.
constexpr size_t kGroupsAhead = 3;
constexpr int64_t kBytesAhead = 256 << 20;

}  // namespace

Fetch start(Gatherer& gatherer, Group group, std::vector<at::Tensor>& sources) {
  auto buffer = gatherer.fresh(group.numel, group.records[0]->shard.options().dtype(group.dtype));
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  for (const auto* record : group.records) {
    outputs.push_back(piece(buffer, offset, gatherer.whole_numel(*record)));
    offset += outputs.back().numel();
  }
  TORCH_INTERNAL_ASSERT(offset == group.numel, "a group of ", offset, " elements was planned as ",
                        group.numel);
  auto pending = gatherer.gather_group(group.records, std::move(outputs), sources);
  return {std::move(group), std::move(buffer), std::move(pending)};
}

void FirstGroups::begin_step(bool noting) {
  noting_ = noting;
  for (auto& group : std::exchange(first_, {})) {
    if (!gatherer_.is_ready(group.records, group.dtype))
      break;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> sources;
    ahead_.push_back(start(gatherer_, std::move(group), sources));
  }
}

at::Tensor FirstGroups::take(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel) {
  if (!gatherer_.is_ready(records, dtype))
    return {};
  Group group{records, dtype, numel};
  if (noting_) {
    int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    for (const auto& other : first_)
      bytes += other.numel * static_cast<int64_t>(c10::elementSize(other.dtype));
    noting_ = bytes <= kBytesAhead && first_.size() < kGroupsAhead;
    if (noting_)
      first_.push_back(group);
  }
  if (ahead_.empty())
    return {};
  if (!(ahead_.front().group == group)) {
    drop();
    return {};
  }
  auto found = std::move(ahead_.front());
  ahead_.pop_front();
  context_.count("prefetched_groups");
  register_pending(found.buffer, std::move(found.pending), {}, context_.device);
  return found.buffer;
}

void FirstGroups::drop() {
  // Their memory must not be given to somebody else while it is being written.
  for (auto& group : ahead_) group.pending.wait(context_.device);
  ahead_.clear();
}

void FirstGroups::forget() {
  drop();
  first_.clear();
  noting_ = false;
}

}  // namespace lightning_zero
