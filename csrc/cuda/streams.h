// Streams and fences: the only place that tells a CPU from an accelerator.
//
// A CPU has one implicit stream and its events throw when recorded, so every operation here is a no-op
// there; work that runs in the background on a CPU is tracked by its c10d::Work instead (see
// transport/communicator.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace c10 {
struct Event;
}

namespace lightning_zero {

inline bool has_streams(const c10::Device& device) {
  return device.type() != c10::kCPU;
}

// The stream on which the caller's work is being queued.
c10::Stream current_stream(const c10::Device& device);

// A stream of our own. High priority: a collective should start as soon as its input is ready, since the
// compute it hides behind is already queued.
c10::Stream new_stream(const c10::Device& device);

// Waits on the host until everything queued on `stream` has run. For debugging only.
void synchronize(const c10::Stream& stream);

// A point in a stream's queue that other streams can wait for without involving the host.
// Copies share the point. A fence that was never recorded, or any fence on a CPU, lets everybody pass.
class Fence {
 public:
  void record(const c10::Stream& stream);
  void block(const c10::Stream& stream) const;
  bool passed() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace lightning_zero
