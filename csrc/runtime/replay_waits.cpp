#include "runtime/replay_waits.h"

#include <c10/util/Exception.h>

namespace lightning_zero {

namespace {

constexpr double kLong = 1;  // seconds: replays that are over sooner compute, and wait for nobody

}  // namespace

void ReplayWaits::started(const at::Tensor& ended, SequenceId lane, int64_t number) {
  TORCH_INTERNAL_ASSERT(ended.device().is_cpu() && ended.scalar_type() == at::kLong);
  if (!ended_.defined() || ended_.const_data_ptr() != ended.const_data_ptr()) {
    running_.clear();
    seen_ = 0;
    ended_ = ended;
  }
  look();  // or they would pile up where no thread asks
  running_.push_back({lane, number, seconds_since_epoch()});
}

void ReplayWaits::forget() {
  seen_ += static_cast<int64_t>(running_.size());
  running_.clear();
}

void ReplayWaits::look() {
  if (running_.empty())
    return;
  const int64_t ended = *static_cast<const volatile int64_t*>(ended_.const_data_ptr<int64_t>());
  const bool any = ended > seen_;
  for (; seen_ < ended && !running_.empty(); ++seen_) running_.pop_front();
  if (any && !running_.empty())
    running_.front().since = seconds_since_epoch();
}

void ReplayWaits::add_to(RankStatus& status) {
  look();
  if (running_.empty() || status.waits() || seconds_since_epoch() - running_.front().since < kLong)
    return;
  const auto& replay = running_.front();
  status.wait = {static_cast<int>(replay.lane), replay.number, "the collectives of a replayed graph",
                 replay.since, /*on_device=*/true};
}

}  // namespace lightning_zero
