// Debugging: a network between hosts that is as slow as somebody wants it, where there is none.
//
// What goes across hosts arrives no sooner than a network card of that bandwidth could bring it, one thing
// after the other, weights and gradients alike. Beside it everything goes on. On a CPU the host sleeps where
// it waits for what has not arrived; on a device a kernel holds up the stream on which it was sent, in graphs
// too. It takes the link where the collective is queued, so that what this takes by itself is not counted
// twice.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <mutex>
#include <optional>

#include "runtime/rank_status.h"

namespace lightning_zero {

class SlowLink {
 public:
  using Clock = std::chrono::steady_clock;

  // `code`: bytes that the device's driver loads, of slow_link.cu; none on a CPU.
  SlowLink(double bytes_per_s, const c10::Device& device, const std::optional<at::Tensor>& code);

  // On a CPU: when `bytes` that are sent now arrive.
  Clock::time_point arrival(int64_t bytes);
  // On a device, around what sends `bytes`, where `stream` comes to it: what the stream is given behind
  // hold() begins when they have arrived. One `lane` after the other on a stream.
  void take(int64_t bytes, const c10::Stream& stream, SequenceId lane) const;
  void hold(const c10::Stream& stream, SequenceId lane) const;

 private:
  uint64_t* time(int64_t which) const;

  double bytes_per_s_;
  std::mutex mutex_;
  Clock::time_point free_at_{};
  void* take_ = nullptr;
  void* hold_ = nullptr;
  at::Tensor times_;  // the device's own: when the link is free, and by lane when what is sent arrives
};

}  // namespace lightning_zero
