// Waits of a device for those of other ranks, as its barriers tell of them in memory of the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "runtime/rank_status.h"

namespace lightning_zero {

class DeviceWaits {
 public:
  // `words`: as DeviceBarrier's; for each of DEVICE_LANES, how many barriers this device has come to, and how
  // many it has passed.
  void watch(const at::Tensor& words);
  // Ends all waits, or has devices wait again.
  void let_pass(bool all) const;
  // What this device waits for, where the host waits for nothing, and how far it is.
  void add_to(RankStatus& status);

 private:
  struct Seen {
    int64_t arrived = 0;
    double since = 0;
  };
  at::Tensor words_;
  std::array<Seen, DEVICE_LANES> seen_{};
};

}  // namespace lightning_zero
