#include "runtime/device_turns.h"

#include <ATen/core/Tensor.h>

#include <array>

#include "runtime/cuda_api.h"
#include "runtime/device.h"

namespace lightning_zero {

namespace {

constexpr unsigned kTurnThreads = 32;                                                       // as in turns.cu
constexpr int kLane = DEVICE_LANES - 1, kArrived = 1 + 2 * kLane, kPassed = 2 + 2 * kLane;  // of weights

}  // namespace

DeviceTurns::DeviceTurns(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words, int64_t rank,
                         ReadingStream readers)
    : rows_(std::move(rows)), words_(std::move(words)), rank_(rank), readers_(std::move(readers)) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  announce_ = driver.find_kernel(module, "announce");
  wait_for_ = driver.find_kernel(module, "wait_for");
  for (const auto& row : rows_)
    TORCH_INTERNAL_ASSERT(row.scalar_type() == at::kInt && row.numel() >= static_cast<int64_t>(rows_.size()));
}

void DeviceTurns::announce(int64_t number) {
  readers_.catch_up();  // what was read is over
  launch(announce_, number, current_stream(rows_[static_cast<size_t>(rank_)].device()));
}

void DeviceTurns::wait_for(int64_t number, bool to_read) {
  const auto device = rows_[static_cast<size_t>(rank_)].device();
  if (!to_read)
    return launch(wait_for_, number, current_stream(device));
  readers_.run([&] { launch(wait_for_, number, current_stream(device)); });
}

void DeviceTurns::launch(void* kernel, int64_t number, const c10::Stream& stream) const {
  std::vector<void*> rows;
  for (const auto& row : rows_) rows.push_back(row.mutable_data_ptr<int>());
  int rank = static_cast<int>(rank_), arrived = kArrived, passed = kPassed;
  auto low = static_cast<uint32_t>(static_cast<uint64_t>(number));
  void* host = words_.mutable_data_ptr<int>();
  // The first is a structure that the kernel takes by value.
  std::array<void*, 6> arguments = {rows.data(), &rank, &low, &host, &arrived, &passed};
  CudaDriver::instance().launch(kernel, 1, kTurnThreads, stream, arguments.data());
}

}  // namespace lightning_zero
