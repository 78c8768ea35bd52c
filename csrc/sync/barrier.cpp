#include "sync/barrier.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>

#include "cuda/cuda_api.h"
#include "sync/signal_pads.h"
#include "tensor_ops.h"

namespace lightning_zero {

namespace {

constexpr int64_t kBarriersPerStep = 1 << 16;  // maximum barriers in a training step
constexpr unsigned kThreads = 32;              // as in signal_kernels.cu

}  // namespace

DeviceBarrier::DeviceBarrier(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words,
                             int64_t rank)
    : pads_(std::move(pads)), words_(std::move(words)), rank_(rank) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  barrier_ = driver.find_kernel(module, "rank_barrier");
  begin_step_ = driver.find_kernel(module, "begin_barrier_step");
  TORCH_INTERNAL_ASSERT(words_.is_pinned() && words_.scalar_type() == at::kInt &&
                        words_.numel() >= device_words::COUNT);
  check_signal_pads(pads_, device_words::BARRIERS * static_cast<int64_t>(pads_.size()));
  counts_ = tensors::zeros(device_words::BARRIERS, pads_[static_cast<size_t>(rank)].options());
}

std::vector<void*> DeviceBarrier::pads_of(int channel) const {
  return pad_addresses(pads_, static_cast<size_t>(channel) * pads_.size());
}

void DeviceBarrier::operator()(int channel, const c10::Stream& stream) const {
  auto pads = pads_of(channel);
  int rank = static_cast<int>(rank_), arrived = device_words::arrived(channel),
      passed = device_words::passed(channel);
  void* count = counts_.mutable_data_ptr<int>() + channel;
  void* host = words_.mutable_data_ptr<int>();
  // The kernel takes the first argument, a structure, by value.
  std::array<void*, 6> arguments = {pads.data(), &rank, &count, &host, &arrived, &passed};
  CudaDriver::instance().launch(barrier_, 1, kThreads, stream, arguments.data());
}

void DeviceBarrier::begin_step(int64_t step, const c10::Stream& stream) const {
  auto pads = pads_of(0);
  int rank = static_cast<int>(rank_);
  void* counts = counts_.mutable_data_ptr<int>();
  // Wraps after 65,536 steps, like the comparison in signal_kernels.cu.
  auto first = static_cast<uint32_t>(static_cast<uint64_t>(step) * kBarriersPerStep);
  std::array<void*, 4> arguments = {pads.data(), &rank, &counts, &first};
  CudaDriver::instance().launch(begin_step_, 1, kThreads, stream, arguments.data());
}

}  // namespace lightning_zero
