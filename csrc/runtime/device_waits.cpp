#include "runtime/device_waits.h"

#include <ATen/core/Tensor.h>

namespace lightning_zero {

namespace {

constexpr const char* kWhat[DEVICE_LANES] = {"a barrier before gradients are added up",
                                             "its turn to read or to write parameters"};

}  // namespace

void DeviceWaits::watch(const at::Tensor& words) {
  TORCH_INTERNAL_ASSERT(words.device().is_cpu() && words.scalar_type() == at::kInt &&
                        words.numel() >= 1 + 2 * DEVICE_LANES);
  words_ = words;
}

void DeviceWaits::let_pass(bool all) const {
  if (words_.defined())
    words_.mutable_data_ptr<int>()[0] = all;
}

void DeviceWaits::add_to(RankStatus& status) {
  if (!words_.defined())
    return;
  const volatile int* words = words_.const_data_ptr<int>();
  for (int lane = 0; lane < DEVICE_LANES; ++lane) {
    const int64_t arrived = words[1 + 2 * lane], passed = words[2 + 2 * lane];
    status.met[static_cast<size_t>(Lane::DEVICE_REDUCE) + lane] = arrived;
    auto& seen = seen_[lane];
    if (arrived == passed || arrived != seen.arrived)
      seen = {arrived, seconds_since_epoch()};
    if (arrived != passed && !status.waits())
      status.wait = {static_cast<int>(Lane::DEVICE_REDUCE) + lane, arrived, kWhat[lane], seen.since,
                     /*on_device=*/true};
  }
}

}  // namespace lightning_zero
