#include "runtime/turns.h"

#include <ATen/core/Tensor.h>

namespace lightning_zero {

namespace {

constexpr int64_t kEpochsPerStep = 1 << 20;  // more than a training step takes

}  // namespace

void EpochLock::begin_writing() {
  if (is_writing())
    return;
  announce(++number_);
  readable_ = false;
  wait_for(number_, /*to_read=*/false);
}

void EpochLock::end_writing() {
  if (is_writing())
    announce(++number_);
}

void EpochLock::wait_to_read() {
  TORCH_INTERNAL_ASSERT(!is_writing());
  if (readable_)
    return;
  wait_for(number_, /*to_read=*/true);
  readable_ = true;
}

void EpochLock::begin_step(int64_t step) {
  TORCH_INTERNAL_ASSERT(!is_writing());
  const auto first = step * kEpochsPerStep;
  if (number_ >= first)
    return;
  announce(number_ = first);
  readable_ = false;
}

void HostEpochLock::announce(int64_t number) {
  numbers_.set(number);
}

void HostEpochLock::wait_for(int64_t number, bool to_read) {
  numbers_.wait_for(number, to_read ? "the others' parameters, which they have not written yet"
                                    : "the others, to have read what is about to be written");
}

}  // namespace lightning_zero
