#include "sync/signals.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

#include "cuda/cuda_api.h"
#include "cuda/streams.h"
#include "sync/signal_pads.h"
#include "tensor_ops.h"

namespace lightning_zero {

namespace {

constexpr int kSpins = 200;  // yields before a waiting rank sleeps
// Naps grow to an eighth of the time waited so far. Constant naps of 50 us took an eighth of a CPU from the
// ranks that were waited for.
constexpr std::chrono::microseconds kFirstNap{50}, kLongestNap{2000};

}  // namespace

SharedCounters::SharedCounters(std::vector<at::Tensor> numbers, int64_t rank, SequenceId sequence)
    : numbers_(std::move(numbers)), rank_(rank), sequence_(sequence) {
  TORCH_INTERNAL_ASSERT(0 <= rank && static_cast<size_t>(rank) < numbers_.size());
  for (const auto& memory : numbers_) {
    TORCH_INTERNAL_ASSERT(memory.scalar_type() == at::kLong && memory.device().is_cpu() &&
                          memory.numel() > 0);
    const auto address = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
    TORCH_INTERNAL_ASSERT(address % std::atomic_ref<int64_t>::required_alignment == 0);
  }
}

void SharedCounters::set(int64_t number) {
  auto& own = *numbers_[static_cast<size_t>(rank_)].mutable_data_ptr<int64_t>();
  std::atomic_ref(own).store(number, std::memory_order_release);
  if (watchdog_)
    watchdog_->activity().set_sequence_number(sequence_, number);
}

bool SharedCounters::all_are(int64_t number) const {
  for (const auto& memory : numbers_) {
    if (std::atomic_ref(*memory.mutable_data_ptr<int64_t>()).load(std::memory_order_acquire) < number)
      return false;
  }
  return true;
}

void SharedCounters::wait_for(int64_t number, const char* what) const {
  if (all_are(number))
    return;
  std::optional<Watchdog::Waiting> waiting;
  if (watchdog_)
    waiting.emplace(*watchdog_, sequence_, number, what);
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

namespace {

constexpr unsigned kSignalThreads = 32;  // as in signal_kernels.cu

}  // namespace

void RemoteSignals::begin(int64_t first) {
  first_ = first;
  set_first(first);
}

void HostRemoteSignals::announce(int64_t part) {
  numbers_.set(number_of(part));
}

void HostRemoteSignals::wait_for(int64_t part, Reader) {
  numbers_.wait_for(number_of(part), "weights that other hosts send to other ranks of this host");
}

DeviceRemoteSignals::DeviceRemoteSignals(const at::Tensor& code, std::vector<at::Tensor> pads,
                                         at::Tensor words, int64_t rank)
    : pads_(std::move(pads)), words_(std::move(words)), rank_(rank) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  announce_send_ = driver.find_kernel(module, "announce_send");
  announce_ = driver.find_kernel(module, "announce_parts");
  wait_for_ = driver.find_kernel(module, "wait_for_parts");
  TORCH_INTERNAL_ASSERT(words_.is_pinned() && words_.scalar_type() == at::kInt &&
                        words_.numel() >= device_words::COUNT);
  check_signal_pads(pads_, static_cast<int64_t>(pads_.size()));
  first_ = tensors::zeros(1, pads_[static_cast<size_t>(rank)].options());
}

void DeviceRemoteSignals::watch(c10::intrusive_ptr<Watchdog> watchdog) {
  if (watchdog)
    watchdog->activity().watch_device(words_);
}

void DeviceRemoteSignals::set_first(int64_t first) {
  first_.fill_(static_cast<int32_t>(low_word(first)));
}

void DeviceRemoteSignals::announce_send(int64_t part) {
  void* host = words_.mutable_data_ptr<int>();
  int sent = device_words::SENT;
  auto number = low_word(number_of(part));
  std::array<void*, 3> arguments = {&host, &sent, &number};
  CudaDriver::instance().launch(announce_send_, 1, 1, current_stream(first_.device()), arguments.data());
}

void DeviceRemoteSignals::announce(int64_t part) {
  auto pads = pad_addresses(pads_);
  int rank = static_cast<int>(rank_);
  auto number = low_word(number_of(part));
  void* host = words_.mutable_data_ptr<int>();
  int received = device_words::RECEIVED;
  // The kernel takes the first argument, a structure, by value.
  std::array<void*, 5> arguments = {pads.data(), &rank, &number, &host, &received};
  CudaDriver::instance().launch(announce_, 1, kSignalThreads, current_stream(first_.device()),
                                arguments.data());
}

void DeviceRemoteSignals::wait_for(int64_t part, Reader reader) {
  auto pads = pad_addresses(pads_);
  int rank = static_cast<int>(rank_);
  void* first = first_.mutable_data_ptr<int>();
  auto parts = low_word(part + 1);
  void* host = words_.mutable_data_ptr<int>();
  const auto number = static_cast<int>(reader);
  int wanted = device_words::wanted(number), got = device_words::got(number);
  std::array<void*, 7> arguments = {pads.data(), &rank, &first, &parts, &host, &wanted, &got};
  CudaDriver::instance().launch(wait_for_, 1, kSignalThreads, current_stream(first_.device()),
                                arguments.data());
}

}  // namespace lightning_zero
