// Barriers that run on devices, and that the host can end.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "sync/signal_pads.h"

namespace lightning_zero {

class DeviceBarrier {
 public:
  // `code`: bytes that the device's driver loads, of barrier.cu. `rows`: of each rank, for each of its lanes
  // as many numbers as there are ranks, zero, which all ranks write; `words`: see device_words.h, zero, and
  // barrier.cu. Numbers are 32 bits wide.
  DeviceBarrier(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words, int64_t rank);

  // All ranks' work queued before it has ended when what `stream` is given next begins. `lane`: from 0.
  void operator()(int channel, const c10::Stream& stream) const;

  // The barriers of an epoch have numbers of their own, higher than those of all epochs before: what a rank
  // missed in one, because an exception interrupted it, nobody waits for in the next. `stream` must be behind
  // all barriers before, and before all that come. Epochs are the same on every rank.
  void begin_step(int64_t step, const c10::Stream& stream) const;

  // Whether the host ends all waits.
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
