#include "watchdog/rank_activity.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace lightning_zero {

namespace {

constexpr const char* kBarrierWaits[device_words::BARRIERS] = {"a barrier before the sum of gradients",
                                                               "its turn to read or write parameters"};
constexpr const char* kPartWait = "weights of other hosts";  // RankActivity adds which weights

}  // namespace

void DeviceWaits::watch(const at::Tensor& words) {
  TORCH_INTERNAL_ASSERT(words.device().is_cpu() && words.scalar_type() == at::kInt &&
                        words.numel() >= device_words::COUNT);
  words_ = words;
}

void DeviceWaits::release_waits(bool all) const {
  if (words_.defined())
    words_.mutable_data_ptr<int>()[device_words::STOP] = all;
}

void DeviceWaits::add(RankStatus& status, SequenceId sequence, Seen& seen, int64_t number, bool waits,
                      const char* what) {
  if (!waits || number != seen.number)
    seen = {number, seconds_since_epoch()};
  if (!waits || (status.is_waiting() && !(status.wait.on_device && seen.since < status.wait.since)))
    return;
  status.wait = {static_cast<int>(sequence), number, what, seen.since, /*on_device=*/true};
}

void DeviceWaits::add_to(RankStatus& status) {
  if (!words_.defined())
    return;
  namespace at_word = device_words;
  const volatile int* words = words_.const_data_ptr<int>();
  for (int channel = 0; channel < at_word::BARRIERS; ++channel) {
    const int64_t arrived = words[at_word::arrived(channel)];
    const auto sequence = static_cast<SequenceId>(static_cast<int>(SequenceId::DEVICE_REDUCE) + channel);
    status.sequence_numbers[static_cast<size_t>(sequence)] = arrived;
    add(status, sequence, barriers_[channel], arrived, arrived != words[at_word::passed(channel)],
        kBarrierWaits[channel]);
  }
  status.sequence_numbers[static_cast<size_t>(SequenceId::PART_SENT)] = words[at_word::SENT];
  status.sequence_numbers[static_cast<size_t>(SequenceId::PART)] = words[at_word::RECEIVED];
  for (int reader = 0; reader < at_word::READERS; ++reader) {
    const int64_t wanted = words[at_word::wanted(reader)];
    add(status, SequenceId::PART, parts_[reader], wanted, wanted != words[at_word::got(reader)], kPartWait);
  }
}

namespace {

constexpr double kLong = 1;  // seconds; shorter replays compute and wait for no rank

}  // namespace

void ReplayWaits::add(const at::Tensor& ended, SequenceId sequence, int64_t number) {
  TORCH_INTERNAL_ASSERT(ended.device().is_cpu() && ended.scalar_type() == at::kLong);
  if (!ended_.defined() || ended_.const_data_ptr() != ended.const_data_ptr()) {
    running_.clear();
    seen_ = 0;
    ended_ = ended;
  }
  update();  // limits their number if no thread asks
  running_.push_back({sequence, number, seconds_since_epoch()});
}

void ReplayWaits::forget() {
  seen_ += static_cast<int64_t>(running_.size());
  running_.clear();
}

void ReplayWaits::update() {
  if (running_.empty())
    return;
  const int64_t ended = *static_cast<const volatile int64_t*>(ended_.const_data_ptr<int64_t>());
  const bool any = ended > seen_;
  for (; seen_ < ended && !running_.empty(); ++seen_) running_.pop_front();
  if (any && !running_.empty())
    running_.front().since = seconds_since_epoch();
}

void ReplayWaits::add_to(RankStatus& status) {
  update();
  if (running_.empty() || status.is_waiting() || seconds_since_epoch() - running_.front().since < kLong)
    return;
  const auto& replay = running_.front();
  status.wait = {static_cast<int>(replay.sequence), replay.number, "the collectives of a replayed CUDA graph",
                 replay.since, /*on_device=*/true};
}

RankActivity::RankActivity(int64_t rank, const std::vector<int64_t>& hosts) {
  mine_.rank = rank;
  mine_.set_host(hosts);
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

void RankActivity::set_progress(std::string how_far) {
  std::lock_guard lock(mutex_);
  mine_.task = {std::move(how_far), mine_.task.updates + 1, seconds_since_epoch()};
  ++activity_;
}

void RankActivity::forget_names() {
  std::lock_guard lock(mutex_);  // status() reads the names under it
  last_ = nullptr;
}

int64_t RankActivity::advance(SequenceId sequence, int64_t count) {
  activity_.fetch_add(1, std::memory_order_relaxed);
  return met_[static_cast<size_t>(sequence)].fetch_add(count, std::memory_order_relaxed) + count;
}

void RankActivity::set_sequence_number(SequenceId sequence, int64_t number) {
  activity_.fetch_add(1, std::memory_order_relaxed);
  met_[static_cast<size_t>(sequence)].store(number, std::memory_order_relaxed);
}

int64_t RankActivity::begin_wait(int sequence, int64_t number, std::string what) {
  std::lock_guard lock(mutex_);
  waits_.push_back({sequence, number, std::move(what), Clock::now(), ++ids_});
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
    return "weights exchanged between hosts";
  return "part " + std::to_string(index + 1) + " of " + std::to_string(parts_.size()) +
         " of the weights exchanged between hosts (" + parts_[index] + ")";
}

void RankActivity::watch_device(const at::Tensor& words) {
  std::lock_guard lock(mutex_);
  devices_.watch(words);
}

void RankActivity::release_device_waits(bool all) const {
  std::lock_guard lock(mutex_);
  devices_.release_waits(all);
}

void RankActivity::watch_replay(const at::Tensor& ended, SequenceId sequence, int64_t number) {
  std::lock_guard lock(mutex_);
  replays_.add(ended, sequence, number);
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
  for (size_t sequence = 0; sequence < SEQUENCE_COUNT; ++sequence)
    status.sequence_numbers[sequence] = met_[sequence];
  if (!waits_.empty()) {
    const auto& wait = waits_.front();
    const auto since =
        seconds_since_epoch() - std::chrono::duration<double>(Clock::now() - wait.since).count();
    // Rounded, because jitter between the two clocks would change the status each time.
    status.wait = {wait.sequence, wait.number, wait.what, std::round(since * 10) / 10};
  }
  devices_.add_to(status);
  replays_.add_to(status);
  if (status.is_waiting() && status.wait.sequence == static_cast<int>(SequenceId::PART))
    status.wait.what = part(status.wait.number);
  return status;
}

}  // namespace lightning_zero
