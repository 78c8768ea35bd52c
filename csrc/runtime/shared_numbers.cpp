#include "runtime/shared_numbers.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

namespace lightning_zero {

namespace {

constexpr int kSpins = 200;  // before a waiting rank gives its processor away for longer
// Each nap is longer than the one before, an eighth of what was waited so far: naps of 50 us all the time
// took an eighth of a processor from those that were waited for.
constexpr std::chrono::microseconds kFirstNap{50}, kLongestNap{2000};

}  // namespace

SharedNumbers::SharedNumbers(std::vector<at::Tensor> numbers, int64_t rank, SequenceId lane)
    : numbers_(std::move(numbers)), rank_(rank), lane_(lane) {
  TORCH_INTERNAL_ASSERT(0 <= rank && static_cast<size_t>(rank) < numbers_.size());
  for (const auto& memory : numbers_) {
    TORCH_INTERNAL_ASSERT(memory.scalar_type() == at::kLong && memory.device().is_cpu() &&
                          memory.numel() > 0);
    const auto address = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
    TORCH_INTERNAL_ASSERT(address % std::atomic_ref<int64_t>::required_alignment == 0);
  }
}

void SharedNumbers::set(int64_t number) {
  auto& own = *numbers_[static_cast<size_t>(rank_)].mutable_data_ptr<int64_t>();
  std::atomic_ref(own).store(number, std::memory_order_release);
  if (watchdog_)
    watchdog_->activity().reach(lane_, number);
}

bool SharedNumbers::all_are(int64_t number) const {
  for (const auto& memory : numbers_) {
    if (std::atomic_ref(*memory.mutable_data_ptr<int64_t>()).load(std::memory_order_acquire) < number)
      return false;
  }
  return true;
}

void SharedNumbers::wait_for(int64_t number, const char* what) const {
  if (all_are(number))
    return;
  std::optional<Watchdog::Waiting> waiting;
  if (watchdog_)
    waiting.emplace(*watchdog_, lane_, number, what);
  auto nap = kFirstNap;
  for (int tries = 0; !all_are(number); ++tries) {
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
