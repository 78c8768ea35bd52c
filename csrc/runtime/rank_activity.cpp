#include "runtime/rank_activity.h"

#include <cmath>

namespace lightning_zero {

RankActivity::RankActivity(int64_t rank, const std::vector<int64_t>& hosts) {
  mine_.rank = rank;
  mine_.stands(hosts);
  mine_.known = true;
  mine_.phase_since = seconds_since_epoch();
}

void RankActivity::enter(Phase phase) {
  std::lock_guard lock(mutex_);
  if (phase == Phase::FORWARD)
    ++mine_.batches;
  mine_.phase = phase;
  mine_.phase_since = seconds_since_epoch();
  ++activity_;
}

void RankActivity::begin_stage() {
  std::lock_guard lock(mutex_);
  ++mine_.stage;
  ++activity_;
}

int64_t RankActivity::stage() const {
  std::lock_guard lock(mutex_);
  return mine_.stage;
}

void RankActivity::busy(std::string what) {
  std::lock_guard lock(mutex_);
  mine_.busy = std::move(what);
  mine_.busy_since = seconds_since_epoch();
  ++activity_;
}

void RankActivity::moved(std::string how_far) {
  std::lock_guard lock(mutex_);
  mine_.task = {std::move(how_far), mine_.task.moves + 1, seconds_since_epoch()};
  ++activity_;
}

void RankActivity::forget_names() {
  std::lock_guard lock(mutex_);  // status() reads them under it
  last_ = nullptr;
}

int64_t RankActivity::meet(SequenceId lane, int64_t meetings) {
  activity_.fetch_add(1, std::memory_order_relaxed);
  return met_[static_cast<size_t>(lane)].fetch_add(meetings, std::memory_order_relaxed) + meetings;
}

void RankActivity::reach(SequenceId lane, int64_t number) {
  activity_.fetch_add(1, std::memory_order_relaxed);
  met_[static_cast<size_t>(lane)].store(number, std::memory_order_relaxed);
}

int64_t RankActivity::begin_wait(int lane, int64_t number, std::string what) {
  std::lock_guard lock(mutex_);
  waits_.push_back({lane, number, std::move(what), Clock::now(), ++ids_});
  return ids_;
}

void RankActivity::end_wait(int64_t id) {
  std::lock_guard lock(mutex_);
  waits_.remove_if([&](const Wait& wait) { return wait.id == id; });
  ++activity_;
}

void RankActivity::set_exchange_parts(int64_t first, std::vector<std::string> weights) {
  std::lock_guard lock(mutex_);
  first_part_ = first;
  parts_ = std::move(weights);
}

std::string RankActivity::part(int64_t number) const {
  // Devices count with 32 bits.
  const auto index = static_cast<uint32_t>(number) - static_cast<uint32_t>(first_part_) - 1;
  if (index >= parts_.size())
    return "weights that hosts exchange";
  return "part " + std::to_string(index + 1) + " of " + std::to_string(parts_.size()) +
         " of the weights that hosts exchange (" + parts_[index] + ")";
}

void RankActivity::watch_device(const at::Tensor& words) {
  std::lock_guard lock(mutex_);
  devices_.watch(words);
}

void RankActivity::let_devices_pass(bool all) const {
  std::lock_guard lock(mutex_);
  devices_.let_pass(all);
}

void RankActivity::watch_replay(const at::Tensor& ended, SequenceId lane, int64_t number) {
  std::lock_guard lock(mutex_);
  replays_.started(ended, lane, number);
}

void RankActivity::forget_replays() {
  std::lock_guard lock(mutex_);
  replays_.forget();
}

RankStatus RankActivity::status() {
  std::lock_guard lock(mutex_);
  auto status = mine_;
  status.activity = activity_;
  if (const auto* last = last_.load(std::memory_order_acquire))
    status.last = *last;
  for (size_t lane = 0; lane < LANES; ++lane) status.sequence_number[lane] = met_[lane];
  if (!waits_.empty()) {
    const auto& wait = waits_.front();
    const auto since =
        seconds_since_epoch() - std::chrono::duration<double>(Clock::now() - wait.since).count();
    // Milliseconds of jitter between two readings of two clocks would be news each time.
    status.wait = {wait.lane, wait.number, wait.what, std::round(since * 10) / 10};
  }
  devices_.add_to(status);
  replays_.add_to(status);
  if (status.waits() && status.wait.lane == static_cast<int>(SequenceId::PART))
    status.wait.what = part(status.wait.number);
  return status;
}

}  // namespace lightning_zero
