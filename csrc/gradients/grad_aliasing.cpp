#include "gradients/grad_aliasing.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace lightning_zero::grad_aliasing {

void raise_in_use(const ParamRecord& record) {
  TORCH_CHECK_VALUE(
      false, "lightning_zero: the weight ", record.name,
      " is used again while its gradient is being reduced or waits for the optimizer step: with "
      "grad_aliasing=True the gradient uses the memory of the low-precision copy of the "
      "weight. Drop gradients that no optimizer step uses (zero_grad()) before using weights "
      "again, or pass tuning=Tuning(grad_aliasing=False), which also keeps memory=... from "
      "choosing it. That is necessary if micro-batches are accumulated, if backward() is "
      "called several times per step, if a backward uses a weight in several graphs, or if "
      "weights are used between a backward and the step.");
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

bool may_view(const ParamRecord& record) {
  return !(record.compute_shard.gradient_arrived && record.is_grad_aliased());
}

void note_view(ParamRecord& record) {
  if (record.is_grad_aliased())
    record.compute_shard.was_read = record.compute_shard.was_viewed = true;
}

void note_arrival(ParamRecord& record) {
  record.compute_shard.gradient_arrived = true;
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
  for (auto& record : context.records)
    record->compute_shard.was_read = record->compute_shard.was_viewed = false;
}

Reads reads_noted(const Context& context) {
  Reads found;
  for (const auto& record : context.records) {
    if (record->compute_shard.was_viewed)
      found.viewed.push_back(record->index);
    else if (record->compute_shard.was_read)
      found.copied.push_back(record->index);
  }
  return found;
}

void check_readable(const Context& context, const Reads& reads) {
  for (const auto index : reads.copied) check_is_weight(context.at(index));
  for (const auto index : reads.viewed) {
    check_is_weight(context.at(index));
    if (!may_view(context.at(index)))
      raise_in_use(context.at(index));
  }
}

void end_backward(Context& context) {
  for (auto& record : context.records) {
    record->compute_shard.gradient_arrived = false;
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
  TORCH_CHECK_VALUE(!record.is_grad_aliased() || record.compute_shard.state != ComputeShardState::WEIGHT ||
                        !record.holds_gradient(),
                    "lightning_zero: the gradient of ", record.name,
                    " was detached and reattached, and its weight was used in between: with "
                    "grad_aliasing=True the weight now uses the gradient's memory. Keep a clone "
                    "(p.grad.clone()) instead, or pass tuning=Tuning(grad_aliasing=False), which also keeps "
                    "memory=... from choosing it.");
}

}  // namespace lightning_zero::grad_aliasing
