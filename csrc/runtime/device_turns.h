// Turns on devices: kernels announce them and wait for them, the host does neither.
#pragma once

#include <functional>
#include <vector>

#include "runtime/turns.h"

namespace lightning_zero {

// The stream on which weights are read; they are written on the current one.
struct ReaderStream {
  std::function<void()> block_current_stream;  // the current stream waits for it
  std::function<void(const std::function<void()>&)>
      run;  // what this queues goes there, behind what is queued already
};

class DeviceEpochLock : public EpochLock {
 public:
  // `code`: bytes that the device's driver loads, of turns.cu. `rows`: of each rank, a number for each rank,
  // 32 bits, zero, that all ranks can write. `words`: as DeviceBarrier's, whose lane of weights they use.
  DeviceEpochLock(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words, int64_t rank,
              ReaderStream readers);

 private:
  void announce(int64_t number) override;
  void wait_for(int64_t number, bool to_read) override;
  void launch(void* kernel, int64_t number, const c10::Stream& stream) const;

  void *announce_, *wait_for_;
  std::vector<at::Tensor> pads_;
  at::Tensor words_;
  int64_t rank_;
  ReaderStream readers_;
};

}  // namespace lightning_zero
