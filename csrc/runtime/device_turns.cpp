#include "runtime/device_turns.h"

#include <ATen/core/Tensor.h>

#include <array>

#include "runtime/cuda_api.h"
#include "runtime/device.h"
#include "runtime/device_words.h"
#include "runtime/rank_rows.h"

namespace lightning_zero {

namespace {

constexpr unsigned kTurnThreads = 32;              // as in turns.cu
constexpr int kLane = device_words::BARRIERS - 1;  // of weights

}  // namespace

DeviceTurns::DeviceTurns(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words, int64_t rank,
                         ReadingStream readers)
    : rows_(std::move(rows)), words_(std::move(words)), rank_(rank), readers_(std::move(readers)) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  announce_ = driver.find_kernel(module, "announce");
  wait_for_ = driver.find_kernel(module, "wait_for");
  TORCH_INTERNAL_ASSERT(words_.is_pinned() && words_.scalar_type() == at::kInt &&
                        words_.numel() >= device_words::COUNT);
  check_rows(rows_, static_cast<int64_t>(rows_.size()));
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
  auto rows = row_addresses(rows_);
  int rank = static_cast<int>(rank_), arrived = device_words::arrived(kLane);
  int passed = device_words::passed(kLane);
  auto low = low_word(number);
  void* host = words_.mutable_data_ptr<int>();
  // The first is a structure that the kernel takes by value.
  std::array<void*, 6> arguments = {rows.data(), &rank, &low, &host, &arrived, &passed};
  CudaDriver::instance().launch(kernel, 1, kTurnThreads, stream, arguments.data());
}

}  // namespace lightning_zero
