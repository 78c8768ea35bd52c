#include "gradients/grad_aliasing.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace lightning_zero::grad_aliasing {

void raise_in_use(const ParamRecord& record) {
  TORCH_CHECK_VALUE(
      false, "lightning_zero: the weight ", record.name,
      " is needed once more while its gradient waits for the optimizer's step, or comes: with "
      "gradients_over_copies=True that lies where the copy of the weight that is computed with lay. Drop "
      "gradients that no optimizer steps by (zero_grad()) before weights are used again, or pass "
      "tuning=Tuning(gradients_over_copies=False), which memory=... does not choose then, either: where "
      "micro-batches are accumulated, where backward() is called several times for one step, where a "
      "backward uses a weight in several graphs, and where weights are used between a backward and the "
      "step.");
}

void check_is_weight(const ParamRecord& record) {
  if (record.compute_shard.state != ComputeShardState::WEIGHT)
    raise_in_use(record);
}

void note_read_until(ParamRecord& record, const Pending& pending) {
  if (!record.is_grad_aliased())
    return;
  record.compute_shard.was_read = true;
  record.compute_shard.last_read = pending;
  record.compute_shard.last_read.drop_continuation();
}

void begin_gradient(ParamRecord& record, const c10::Device& device) {
  if (!record.is_grad_aliased())
    return;
  record.compute_shard.state = ComputeShardState::GRADIENT_PENDING;
  std::exchange(record.compute_shard.last_read, {}).wait(device);
}

void forget_reads(Context& context) {
  for (auto& record : context.records) record->compute_shard.last_read = {};
}

void begin_noting_reads(Context& context) {
  for (auto& record : context.records) record->compute_shard.was_read = false;
}

std::vector<int64_t> parameters_read(const Context& context) {
  std::vector<int64_t> found;
  for (const auto& record : context.records) {
    if (record->compute_shard.was_read)
      found.push_back(record->index);
  }
  return found;
}

void end_backward(Context& context) {
  for (auto& record : context.records) {
    if (!record->is_grad_aliased())
      continue;
    if (record->compute_shard.state == ComputeShardState::GRADIENT_PENDING)
      record->compute_shard.state = ComputeShardState::GRADIENT;
    record->compute_shard.last_read = {};
  }
}

bool may_write(const ParamRecord& record) {
  const auto holds = record.compute_shard.state;
  return holds == ComputeShardState::WEIGHT ||
         (holds == ComputeShardState::GRADIENT && !record.holds_gradient());
}

void check_is_gradient(const ParamRecord& record) {
  TORCH_CHECK_VALUE(
      !record.is_grad_aliased() || record.compute_shard.state != ComputeShardState::WEIGHT ||
          !record.holds_gradient(),
      "lightning_zero: the gradient of ", record.name,
      " was put aside and put back, and its weight was needed in between: with gradients_over_copies=True "
      "that is what lies there now. Put a clone aside (p.grad.clone()), or pass "
      "tuning=Tuning(gradients_over_copies=False), which memory=... does not choose then, either.");
}

}  // namespace lightning_zero::grad_aliasing
