#include "transport/slow_link.h"

#include <algorithm>
#include <array>

#include "runtime/cuda_api.h"
#include "runtime/tensors.h"

namespace lightning_zero {

SlowLink::SlowLink(double bytes_per_s, const c10::Device& device, const std::optional<at::Tensor>& code)
    : bytes_per_s_(bytes_per_s) {
  if (!code)
    return;
  const auto& driver = CudaDriver::instance();
  void* module = driver.load_module(code->const_data_ptr());
  take_ = driver.find_kernel(module, "take");
  hold_ = driver.find_kernel(module, "hold");
  times_ = tensors::zeros(1 + LANES, at::TensorOptions().dtype(at::kLong).device(device));
}

SlowLink::Clock::time_point SlowLink::arrival(int64_t bytes) {
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / bytes_per_s_);
  std::lock_guard lock(mutex_);
  free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
  return free_at_;
}

uint64_t* SlowLink::time(int64_t which) const {
  return reinterpret_cast<uint64_t*>(times_.mutable_data_ptr<int64_t>()) + which;
}

void SlowLink::take(int64_t bytes, const c10::Stream& stream, SequenceId lane) const {
  auto* free_at = time(0);
  auto* arrives = time(1 + static_cast<int64_t>(lane));
  auto nanoseconds = static_cast<uint64_t>(1e9 * static_cast<double>(bytes) / bytes_per_s_);
  std::array<void*, 3> arguments = {&free_at, &nanoseconds, &arrives};
  CudaDriver::instance().launch(take_, 1, 1, stream, arguments.data());
}

void SlowLink::hold(const c10::Stream& stream, SequenceId lane) const {
  auto* arrives = time(1 + static_cast<int64_t>(lane));
  std::array<void*, 1> arguments = {&arrives};
  CudaDriver::instance().launch(hold_, 1, 1, stream, arguments.data());
}

}  // namespace lightning_zero
