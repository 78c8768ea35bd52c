// Streams and fences. Only this file distinguishes CPUs from accelerators.
//
// A CPU has one implicit stream, and its events throw when recorded, so all operations are no-ops there.
// Background work on a CPU is tracked by its c10d::Work instead (see transport/communicator.h).
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

// Return the stream on which the caller queues work.
c10::Stream current_stream(const c10::Device& device);

// Return a new stream. It has high priority, since a collective should start when its input is ready, before
// compute that is already queued.
c10::Stream new_stream(const c10::Device& device);

// Block the host until all work on `stream` has completed. For debugging only.
void synchronize(const c10::Stream& stream);

// A point in a stream's queue that other streams can wait for without the host. Copies share the point.
// Waiting returns immediately for a fence that was never recorded, and on a CPU.
class Fence {
 public:
  void record(const c10::Stream& stream);
  void block(const c10::Stream& stream) const;
  bool passed() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace lightning_zero
