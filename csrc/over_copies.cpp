#include "over_copies.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace lightning_zero::over_copies {

void refuse(const ParamRecord& record) {
  TORCH_CHECK_VALUE(
      false, "lightning_zero: the weight ", record.name,
      " is needed once more while its gradient waits for the optimizer's step, or comes: with "
      "grad_aliasing=True that lies where the copy of the weight that is computed with lay. Drop "
      "gradients that no optimizer steps by (zero_grad()) before weights are used again, or pass "
      "tuning=Tuning(grad_aliasing=False), which memory=... does not choose then, either: where "
      "micro-batches are accumulated, where backward() is called several times for one step, where a "
      "backward uses a weight in several graphs, and where weights are used between a backward and the "
      "step.");
}

void check(const ParamRecord& record) {
  if (record.compute_copy.holds != InCopy::WEIGHT)
    refuse(record);
}

void is_read(ParamRecord& record, const Pending& pending) {
  if (!record.grad_over_copy())
    return;
  record.compute_copy.was_read = true;
  record.compute_copy.last_read = pending;
  record.compute_copy.last_read.drop_continuation();
}

void arrive(ParamRecord& record, const c10::Device& device) {
  if (!record.grad_over_copy())
    return;
  record.compute_copy.holds = InCopy::GRADIENT_COMES;
  std::exchange(record.compute_copy.last_read, {}).wait(device);
}

void forget_reads(Context& context) {
  for (auto& record : context.records) record->compute_copy.last_read = {};
}

void note_reads(Context& context) {
  for (auto& record : context.records) record->compute_copy.was_read = false;
}

std::vector<int64_t> reads(const Context& context) {
  std::vector<int64_t> found;
  for (const auto& record : context.records) {
    if (record->compute_copy.was_read)
      found.push_back(record->index);
  }
  return found;
}

void have_arrived(Context& context) {
  for (auto& record : context.records) {
    if (!record->grad_over_copy())
      continue;
    if (record->compute_copy.holds == InCopy::GRADIENT_COMES)
      record->compute_copy.holds = InCopy::GRADIENT;
    record->compute_copy.last_read = {};
  }
}

bool may_write(const ParamRecord& record) {
  const auto holds = record.compute_copy.holds;
  return holds == InCopy::WEIGHT || (holds == InCopy::GRADIENT && !record.keeps_gradient());
}

void check_kept(const ParamRecord& record) {
  TORCH_CHECK_VALUE(
      !record.grad_over_copy() || record.compute_copy.holds != InCopy::WEIGHT || !record.keeps_gradient(),
      "lightning_zero: the gradient of ", record.name,
      " was put aside and put back, and its weight was needed in between: with grad_aliasing=True "
      "that is what lies there now. Put a clone aside (p.grad.clone()), or pass "
      "tuning=Tuning(grad_aliasing=False), which memory=... does not choose then, either.");
}

}  // namespace lightning_zero::over_copies
