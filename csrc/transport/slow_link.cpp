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
  kernel_ = driver.find_kernel(driver.load_module(code->const_data_ptr()), "hold");
  device_free_at_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).device(device));
}

SlowLink::Clock::time_point SlowLink::arrival(int64_t bytes) {
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / bytes_per_s_);
  std::lock_guard lock(mutex_);
  free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
  return free_at_;
}

void SlowLink::hold(int64_t bytes, const c10::Stream& stream) const {
  void* free_at = device_free_at_.mutable_data_ptr<int64_t>();
  auto nanoseconds = static_cast<uint64_t>(1e9 * static_cast<double>(bytes) / bytes_per_s_);
  std::array<void*, 2> arguments = {&free_at, &nanoseconds};
  CudaDriver::instance().launch(kernel_, 1, 1, stream, arguments.data());
}

}  // namespace lightning_zero
