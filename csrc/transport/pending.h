// Something that has been launched, and what is to be done with its result.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <vector>

#include "runtime/device.h"
#include "runtime/watchdog.h"

namespace c10d {
class Work;
}

namespace lightning_zero {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// A collective that has been launched, and what is to be done with its result.
// Must be waited for exactly where the result is first needed; waiting twice is harmless.
class Pending {
 public:
  // Not here, where nobody knows what a Work is: torch's headers of process groups take seconds to compile.
  Pending();
  Pending(const Pending&);
  Pending(Pending&&) noexcept;
  Pending& operator=(const Pending&);
  Pending& operator=(Pending&&) noexcept;
  ~Pending();

  // Queues the wait on the caller's stream (accelerator) or blocks the caller (CPU), then, on a CPU, runs
  // the continuation; on an accelerator the continuation was queued behind the collective at launch.
  void wait(const c10::Device& device);

  // True once wait() would not block the host. Always true on an accelerator, where it never does.
  bool ready() const;

  // Holds a host at most this long; true when ready. See [Note: one order on every rank]: a rank whose
  // backward differs from its peers' must not wait here for ever, or nobody reaches the point where the ranks
  // agree.
  bool ready_within(std::chrono::milliseconds limit) const;

  // The result is unwanted; the collective itself still has to be waited for.
  void drop_continuation() { continuation_ = {}; }

 private:
  friend class Communicator;
  void sleep() const;  // until it arrives

  Works works_;
  Fence fence_;
  std::function<void()> continuation_;
  // By which the watchdog counts what the works are.
  c10::intrusive_ptr<Watchdog> watchdog_;
  SequenceId lane_ = SequenceId::GATHER;
  int64_t number_ = 0;
  const char* what_ = "";
  std::chrono::steady_clock::time_point arrives_{};  // no sooner, on a CPU: see SlowLink
};

// Whoever reads `tensor` by _c10d_functional::wait_tensor waits for `pending`; `sources` live until then: a
// cast copy has to until the collective has read it.
void register_pending(const at::Tensor& tensor, Pending pending, std::vector<at::Tensor> sources,
                      const c10::Device& device);

// `length` elements of a contiguous tensor, as 1-D. There are thousands in a step, and narrow() takes three
// times as long on the host.
inline at::Tensor piece(const at::Tensor& whole, int64_t begin, int64_t length) {
  return whole.as_strided({length}, {1}, whole.storage_offset() + begin);
}

// NaN, or the least integer.
void fill_with_poison(at::Tensor tensor);

}  // namespace lightning_zero
