#include "sync/epoch_lock.h"

#include <ATen/core/Tensor.h>

#include <array>

#include "cuda/cuda_api.h"
#include "cuda/streams.h"
#include "sync/signal_pads.h"

namespace lightning_zero {

namespace {

constexpr int64_t kEpochsPerStep = 1 << 20;  // more epochs than a training step has

}  // namespace

void EpochLock::begin_writing() {
  if (is_writing())
    return;
  announce(++number_);
  readable_ = false;
  wait_for(number_, /*to_read=*/false);
}

void EpochLock::end_writing() {
  if (is_writing())
    announce(++number_);
}

void EpochLock::wait_to_read() {
  TORCH_INTERNAL_ASSERT(!is_writing());
  if (readable_)
    return;
  wait_for(number_, /*to_read=*/true);
  readable_ = true;
}

void EpochLock::begin_step(int64_t step) {
  TORCH_INTERNAL_ASSERT(!is_writing());
  const auto first = step * kEpochsPerStep;
  if (number_ >= first)
    return;
  announce(number_ = first);
  readable_ = false;
}

void HostEpochLock::announce(int64_t number) {
  numbers_.set(number);
}

void HostEpochLock::wait_for(int64_t number, bool to_read) {
  numbers_.wait_for(number, to_read ? "other ranks, to write their parameters"
                                    : "other ranks, to finish reading parameters");
}

namespace {

constexpr unsigned kEpochLockThreads = 32;         // as in signal_kernels.cu
constexpr int kLane = device_words::BARRIERS - 1;  // of weights

}  // namespace

DeviceEpochLock::DeviceEpochLock(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words,
                                 int64_t rank, ReaderStream readers)
    : pads_(std::move(pads)), words_(std::move(words)), rank_(rank), readers_(std::move(readers)) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  announce_ = driver.find_kernel(module, "announce_epoch");
  wait_for_ = driver.find_kernel(module, "wait_for_epoch");
  TORCH_INTERNAL_ASSERT(words_.is_pinned() && words_.scalar_type() == at::kInt &&
                        words_.numel() >= device_words::COUNT);
  check_signal_pads(pads_, static_cast<int64_t>(pads_.size()));
}

void DeviceEpochLock::announce(int64_t number) {
  readers_.block_current_stream();  // reads have completed
  launch(announce_, number, current_stream(pads_[static_cast<size_t>(rank_)].device()));
}

void DeviceEpochLock::wait_for(int64_t number, bool to_read) {
  const auto device = pads_[static_cast<size_t>(rank_)].device();
  if (!to_read)
    return launch(wait_for_, number, current_stream(device));
  readers_.run([&] { launch(wait_for_, number, current_stream(device)); });
}

void DeviceEpochLock::launch(void* kernel, int64_t number, const c10::Stream& stream) const {
  auto pads = pad_addresses(pads_);
  int rank = static_cast<int>(rank_), arrived = device_words::arrived(kLane);
  int passed = device_words::passed(kLane);
  auto low = low_word(number);
  void* host = words_.mutable_data_ptr<int>();
  // The kernel takes the first argument, a structure, by value.
  std::array<void*, 6> arguments = {pads.data(), &rank, &low, &host, &arrived, &passed};
  CudaDriver::instance().launch(kernel, 1, kEpochLockThreads, stream, arguments.data());
}

}  // namespace lightning_zero
