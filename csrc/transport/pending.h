// Handles of launched collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <vector>

#include "cuda/streams.h"
#include "watchdog/watchdog.h"

namespace c10d {
class Work;
}

namespace lightning_zero {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// A launched collective, and the continuation for its result. It must be waited for where the result is first
// needed. Waiting twice is harmless.
class Pending {
 public:
  // Defined in the .cpp file: c10d::Work is incomplete here, because torch's headers of process groups take
  // seconds to compile.
  Pending();
  Pending(const Pending&);
  Pending(Pending&&) noexcept;
  Pending& operator=(const Pending&);
  Pending& operator=(Pending&&) noexcept;
  ~Pending();

  // Queue the wait on the caller's stream (accelerator), or block the caller and run the continuation (CPU).
  // On an accelerator, the continuation was queued after the collective at launch.
  void wait(const c10::Device& device);

  // Return true if wait() would not block the host. Always true on an accelerator.
  bool ready() const;

  // Block the host at most this long; return true if ready. A rank whose backward differs from its peers'
  // must not wait here forever, or it never reaches the consensus, see [Note: one order on every rank].
  bool ready_within(std::chrono::milliseconds limit) const;

  // The result is not needed. The collective itself must still be waited for.
  void drop_continuation() { continuation_ = {}; }

 private:
  friend class Communicator;
  void sleep() const;  // until it arrives

  Works works_;
  Fence fence_;
  std::function<void()> continuation_;
  // Identifies the collective for the watchdog.
  c10::intrusive_ptr<Watchdog> watchdog_;
  SequenceId sequence_ = SequenceId::GATHER;
  int64_t number_ = 0;
  const char* what_ = "";
  std::chrono::steady_clock::time_point arrives_{};  // on a CPU: the earliest arrival, see EmulatedLink
};

// Let readers of `tensor` wait for `pending` by _c10d_functional::wait_tensor. `sources` live until then,
// such as a cast copy that the collective reads.
void register_pending(const at::Tensor& tensor, Pending pending, std::vector<at::Tensor> sources,
                      const c10::Device& device);

// Return `length` elements of a contiguous tensor as a one-dimensional view. A step needs thousands of views,
// and narrow() takes three times as long on the host.
inline at::Tensor flat_range(const at::Tensor& tensor, int64_t begin, int64_t length) {
  return tensor.as_strided({length}, {1}, tensor.storage_offset() + begin);
}

// Fill with NaN, or with a constant for integer dtypes.
void fill_with_nan(at::Tensor tensor);

}  // namespace lightning_zero
