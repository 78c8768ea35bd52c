// Barriers that run on devices and that the host can end.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "sync/signal_pads.h"

namespace lightning_zero {

class DeviceBarrier {
 public:
  // `code`: the compiled signal_kernels.cu. `pads`: each rank's signal pad, zeros, which all ranks can write,
  // with one 32-bit number per channel and rank. `words`: zeros, see signal_pads.h.
  DeviceBarrier(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words, int64_t rank);

  // Work that is queued on `stream` afterwards begins after all earlier work of all ranks. `channel`: from 0.
  void operator()(int channel, const c10::Stream& stream) const;

  // Begin a training step. Its barriers have higher numbers than all earlier ones, so no rank waits for a
  // barrier that a peer missed because of an exception. `stream` must be ordered after all earlier and before
  // all later barriers. `step` must be the same on every rank.
  void begin_step(int64_t step, const c10::Stream& stream) const;

  // Switch whether the host ends all waits.
  void release_waits(bool all) const { words_.mutable_data_ptr<int>()[device_words::STOP] = all; }
  const at::Tensor& words() const { return words_; }

 private:
  std::vector<void*> pads_of(int channel) const;

  void *barrier_, *begin_step_;
  std::vector<at::Tensor> pads_;
  at::Tensor counts_, words_;
  int64_t rank_;
};

}  // namespace lightning_zero
