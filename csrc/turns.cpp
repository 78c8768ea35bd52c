#include "turns.h"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace lightning_zero {

namespace {

constexpr int64_t kTurnsOfStep = 1 << 20;  // more than a training step takes
constexpr int kSpins = 200;                // before a waiting rank gives its processor away for longer
constexpr std::chrono::microseconds kNap{50};

int64_t* number_in(const at::Tensor& memory) {
  return memory.mutable_data_ptr<int64_t>();
}

}  // namespace

Turns::Turns(std::vector<at::Tensor> numbers, int64_t rank) : numbers_(std::move(numbers)), rank_(rank) {
  for (const auto& memory : numbers_)
    TORCH_INTERNAL_ASSERT(memory.scalar_type() == at::kLong && memory.device().is_cpu());
}

void Turns::announce(int64_t number) {
  number_ = number;
  std::atomic_ref(*number_in(numbers_[static_cast<size_t>(rank_)])).store(number, std::memory_order_release);
  if (watchdog_)
    watchdog_->reach(Lane::TURN, number);
}

bool Turns::all_have_come() const {
  for (const auto& memory : numbers_) {
    if (std::atomic_ref(*number_in(memory)).load(std::memory_order_acquire) < number_)
      return false;
  }
  return true;
}

void Turns::wait(const char* what) {
  if (all_have_come())
    return;
  std::optional<Watchdog::Waiting> waiting;
  if (watchdog_)
    waiting.emplace(*watchdog_, Lane::TURN, number_, what);
  for (int tries = 0; !all_have_come(); ++tries) {
    if (tries < kSpins) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kNap);
    if (watchdog_)
      watchdog_->check();
  }
}

void Turns::begin_writing() {
  if (writing())
    return;
  announce(number_ + 1);
  readable_ = false;
  wait("the others, to have read what is about to be written");
}

void Turns::end_writing() {
  if (writing())
    announce(number_ + 1);
}

void Turns::wait_to_read() {
  TORCH_INTERNAL_ASSERT(!writing());
  if (readable_)
    return;
  wait("the others' parameters, which they have not written yet");
  readable_ = true;
}

void Turns::begin_step(int64_t step) {
  TORCH_INTERNAL_ASSERT(!writing());
  const auto first = step * kTurnsOfStep;
  if (number_ >= first)
    return;
  announce(first);
  readable_ = false;
}

}  // namespace lightning_zero
