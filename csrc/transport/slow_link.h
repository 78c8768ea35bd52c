// Debugging: a network between hosts that is as slow as somebody wants it, where there is none.
//
// What goes across hosts arrives no sooner than a network card of that bandwidth could bring it, one thing
// after the other, weights and gradients alike. Beside it everything goes on. On a CPU the host sleeps where
// it waits for what has not arrived; on a device a kernel holds up the stream on which it was sent, in graphs
// too.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <mutex>
#include <optional>

namespace lightning_zero {

class SlowLink {
 public:
  using Clock = std::chrono::steady_clock;

  // `code`: bytes that the device's driver loads, of slow_link.cu; none on a CPU.
  SlowLink(double bytes_per_s, const c10::Device& device, const std::optional<at::Tensor>& code);

  // On a CPU: when `bytes` that are sent now arrive.
  Clock::time_point arrival(int64_t bytes);
  // On a device: what `stream` is given next begins when they have.
  void hold(int64_t bytes, const c10::Stream& stream) const;

 private:
  double bytes_per_s_;
  std::mutex mutex_;
  Clock::time_point free_at_{};
  void* kernel_ = nullptr;
  at::Tensor device_free_at_;  // in the device's own time
};

}  // namespace lightning_zero
