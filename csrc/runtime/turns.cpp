#include "runtime/turns.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

namespace lightning_zero {

namespace {

constexpr int64_t kTurnsOfStep = 1 << 20;  // more than a training step takes
constexpr int kSpins = 200;                // before a waiting rank gives its processor away for longer
// Each nap is longer than the one before, an eighth of what was waited so far: naps of 50 us all the time
// took an eighth of a processor from those that were waited for.
constexpr std::chrono::microseconds kFirstNap{50}, kLongestNap{2000};

}  // namespace

void Turns::begin_writing() {
  if (writing())
    return;
  announce(++number_);
  readable_ = false;
  wait_for(number_, /*to_read=*/false);
}

void Turns::end_writing() {
  if (writing())
    announce(++number_);
}

void Turns::wait_to_read() {
  TORCH_INTERNAL_ASSERT(!writing());
  if (readable_)
    return;
  wait_for(number_, /*to_read=*/true);
  readable_ = true;
}

void Turns::begin_step(int64_t step) {
  TORCH_INTERNAL_ASSERT(!writing());
  const auto first = step * kTurnsOfStep;
  if (number_ >= first)
    return;
  announce(number_ = first);
  readable_ = false;
}

HostTurns::HostTurns(std::vector<at::Tensor> numbers, int64_t rank)
    : numbers_(std::move(numbers)), rank_(rank) {
  for (const auto& memory : numbers_)
    TORCH_INTERNAL_ASSERT(memory.scalar_type() == at::kLong && memory.device().is_cpu());
}

void HostTurns::announce(int64_t number) {
  auto& own = *numbers_[static_cast<size_t>(rank_)].mutable_data_ptr<int64_t>();
  std::atomic_ref(own).store(number, std::memory_order_release);
  if (watchdog_)
    watchdog_->activity().reach(Lane::TURN, number);
}

bool HostTurns::all_have_come_to(int64_t number) const {
  for (const auto& memory : numbers_) {
    if (std::atomic_ref(*memory.mutable_data_ptr<int64_t>()).load(std::memory_order_acquire) < number)
      return false;
  }
  return true;
}

void HostTurns::wait_for(int64_t number, bool to_read) {
  if (all_have_come_to(number))
    return;
  std::optional<Watchdog::Waiting> waiting;
  if (watchdog_)
    waiting.emplace(*watchdog_, Lane::TURN, number,
                    to_read ? "the others' parameters, which they have not written yet"
                            : "the others, to have read what is about to be written");
  auto nap = kFirstNap;
  for (int tries = 0; !all_have_come_to(number); ++tries) {
    if (tries < kSpins) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap + nap / 8, kLongestNap);
    if (watchdog_)
      watchdog_->check();
  }
}

}  // namespace lightning_zero
