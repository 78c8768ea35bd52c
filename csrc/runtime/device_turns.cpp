#include "runtime/device_turns.h"

#include <ATen/core/Tensor.h>

#include <array>

#include "runtime/cuda_api.h"
#include "runtime/device.h"
#include "runtime/device_words.h"
#include "runtime/rank_rows.h"

namespace lightning_zero {

namespace {

constexpr unsigned kEpochLockThreads = 32;              // as in turns.cu
constexpr int kLane = device_words::BARRIERS - 1;  // of weights

}  // namespace

DeviceEpochLock::DeviceEpochLock(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words, int64_t rank,
                         ReaderStream readers)
    : pads_(std::move(pads)), words_(std::move(words)), rank_(rank), readers_(std::move(readers)) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  announce_ = driver.find_kernel(module, "announce");
  wait_for_ = driver.find_kernel(module, "wait_for");
  TORCH_INTERNAL_ASSERT(words_.is_pinned() && words_.scalar_type() == at::kInt &&
                        words_.numel() >= device_words::COUNT);
  check_signal_pads(pads_, static_cast<int64_t>(pads_.size()));
}

void DeviceEpochLock::announce(int64_t number) {
  readers_.block_current_stream();  // what was read is over
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
  // The first is a structure that the kernel takes by value.
  std::array<void*, 6> arguments = {pads.data(), &rank, &low, &host, &arrived, &passed};
  CudaDriver::instance().launch(kernel, 1, kEpochLockThreads, stream, arguments.data());
}

}  // namespace lightning_zero
