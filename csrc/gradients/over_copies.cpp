#include "gradients/over_copies.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace lightning_zero::over_copies {

void refuse(const ParamRecord& record) {
  TORCH_CHECK_VALUE(
      false, "lightning_zero: the weight ", record.name,
      " is needed once more while its gradient waits for the optimizer's step, or comes: with "
      "gradients_over_copies=True that lies where the copy of the weight that is computed with lay. Leave "
      "the option out where micro-batches are accumulated, where backward() is called several times for one "
      "step, and where weights are read or changed between a backward and the step.");
}

void check(const ParamRecord& record) {
  if (record.compute_copy.holds != InCopy::WEIGHT)
    refuse(record);
}

void is_read(ParamRecord& record, const Pending& pending) {
  if (!record.grad_over_copy())
    return;
  record.compute_copy.last_read = pending;
  record.compute_copy.last_read.drop_continuation();
}

void arrive(ReduceBucket& bucket, const c10::Device& device) {
  for (auto& slot : bucket.slots()) {
    if (!slot.record->grad_over_copy())
      continue;
    slot.record->compute_copy.holds = InCopy::GRADIENT_COMES;
    std::exchange(slot.record->compute_copy.last_read, {}).wait(device);
  }
}

void forget_reads(Context& context) {
  for (auto& record : context.records) record->compute_copy.last_read = {};
}

void have_arrived(Context& context) {
  for (auto& record : context.records) {
    if (record->compute_copy.holds == InCopy::GRADIENT_COMES)
      record->compute_copy.holds = InCopy::GRADIENT;
    record->compute_copy.last_read = {};
  }
}

void write(ParamRecord& record) {
  const bool wanted = record.compute_copy.holds == InCopy::GRADIENT && record.keeps_gradient();
  if (wanted || record.compute_copy.holds == InCopy::GRADIENT_COMES)
    refuse(record);
  record.compute_copy.holds = InCopy::WEIGHT;
}

}  // namespace lightning_zero::over_copies
