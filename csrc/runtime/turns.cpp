#include "runtime/turns.h"

#include <ATen/core/Tensor.h>

namespace lightning_zero {

namespace {

constexpr int64_t kTurnsOfStep = 1 << 20;  // more than a training step takes

}  // namespace

void Turns::begin_writing() {
  if (writing())
    return;
  announce(++number_);
  readable_ = false;
  wait_for(number_, /*to_read=*/false);
}

void Turns::end_writing() {
  if (writing())
    announce(++number_);
}

void Turns::wait_to_read() {
  TORCH_INTERNAL_ASSERT(!writing());
  if (readable_)
    return;
  wait_for(number_, /*to_read=*/true);
  readable_ = true;
}

void Turns::begin_step(int64_t step) {
  TORCH_INTERNAL_ASSERT(!writing());
  const auto first = step * kTurnsOfStep;
  if (number_ >= first)
    return;
  announce(number_ = first);
  readable_ = false;
}

void HostTurns::announce(int64_t number) {
  numbers_.set(number);
}

void HostTurns::wait_for(int64_t number, bool to_read) {
  numbers_.wait_for(number, to_read ? "the others' parameters, which they have not written yet"
                                    : "the others, to have read what is about to be written");
}

}  // namespace lightning_zero
