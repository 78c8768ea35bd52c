// Waits of a device for those of other ranks, as its kernels tell of them in memory of the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "runtime/device_words.h"
#include "runtime/rank_status.h"

namespace lightning_zero {

class DeviceWaits {
 public:
  // `words`: see device_words.h.
  void watch(const at::Tensor& words);
  // Ends all waits, or has devices wait again.
  void let_pass(bool all) const;
  // What this device waits for, where the host waits for nothing, and how far it is.
  void add_to(RankStatus& status);

 private:
  struct Seen {
    int64_t number = 0;
    double since = 0;
  };
  // Kernels wait for `number` of that lane, or are past it.
  void add(RankStatus& status, SequenceId lane, Seen& seen, int64_t number, bool waits, const char* what);

  at::Tensor words_;
  std::array<Seen, device_words::BARRIERS> barriers_{};
  std::array<Seen, device_words::READERS> parts_{};
};

}  // namespace lightning_zero
