#include "runtime/device_waits.h"

#include <ATen/core/Tensor.h>

namespace lightning_zero {

namespace {

constexpr const char* kBarrierWaits[device_words::BARRIERS] = {"a barrier before gradients are added up",
                                                               "its turn to read or to write parameters"};
constexpr const char* kPartWait = "weights of other hosts";  // which ones, RankActivity knows

}  // namespace

void DeviceWaits::watch(const at::Tensor& words) {
  TORCH_INTERNAL_ASSERT(words.device().is_cpu() && words.scalar_type() == at::kInt &&
                        words.numel() >= device_words::COUNT);
  words_ = words;
}

void DeviceWaits::let_pass(bool all) const {
  if (words_.defined())
    words_.mutable_data_ptr<int>()[device_words::STOP] = all;
}

void DeviceWaits::add(RankStatus& status, SequenceId lane, Seen& seen, int64_t number, bool waits,
                      const char* what) {
  if (!waits || number != seen.number)
    seen = {number, seconds_since_epoch()};
  if (!waits || (status.waits() && !(status.wait.on_device && seen.since < status.wait.since)))
    return;
  status.wait = {static_cast<int>(lane), number, what, seen.since, /*on_device=*/true};
}

void DeviceWaits::add_to(RankStatus& status) {
  if (!words_.defined())
    return;
  namespace at_word = device_words;
  const volatile int* words = words_.const_data_ptr<int>();
  for (int lane = 0; lane < at_word::BARRIERS; ++lane) {
    const int64_t arrived = words[at_word::arrived(lane)];
    const auto sequence_number = static_cast<SequenceId>(static_cast<int>(SequenceId::DEVICE_REDUCE) + lane);
    status.sequence_number[static_cast<size_t>(sequence_number)] = arrived;
    add(status, sequence_number, barriers_[lane], arrived, arrived != words[at_word::passed(lane)], kBarrierWaits[lane]);
  }
  status.sequence_number[static_cast<size_t>(SequenceId::PART_SENT)] = words[at_word::SENT];
  status.sequence_number[static_cast<size_t>(SequenceId::PART)] = words[at_word::COME];
  for (int reader = 0; reader < at_word::READERS; ++reader) {
    const int64_t wanted = words[at_word::wanted(reader)];
    add(status, SequenceId::PART, parts_[reader], wanted, wanted != words[at_word::got(reader)], kPartWait);
  }
}

}  // namespace lightning_zero
