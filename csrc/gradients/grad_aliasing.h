// Gradients that alias the compute shards of their weights.
//
// [Note: gradient aliasing] After a backward has used a weight for the last time, its compute shard is not
// read until the optimizer step. The reduced gradient has the same number of elements. So `grad` may be the
// compute shard's memory, in its dtype, and needs no memory of its own. The next user of the compute shard
// finds it stale and rewrites it.
//
// This is safe because a rank reduces a bucket after all ranks have sent theirs, and a launch waits for this
// rank's last read of these weights. A later read, in the same backward or before the step, would see the
// gradient. With readable peer shards or all-gathers, weights are then read from the shards. In other cases,
// and in replays, the read raises an error. A compute shard is not rewritten while its gradient is attached
// to param.grad. A detached gradient makes it stale.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"
#include "transport/pending.h"

namespace lightning_zero::grad_aliasing {

// Raise if a compute shard that is about to be read holds a gradient.
void check_is_weight(const ParamRecord& record);
// The compute shard is read until `pending` completes.
void note_read_until(ParamRecord& record, const Pending& pending);
// Return true if a compiled graph may read the compute shard itself from now until it enqueues the gradient.
// After another graph of this backward has enqueued one, a bucket may be launched at any time.
bool may_view(const ParamRecord& record);
// A compiled graph reads the compute shard itself, on the current stream.
void note_view(ParamRecord& record);
// This backward has enqueued a gradient of the parameter.
void note_arrival(ParamRecord& record);
// The parameter's gradient is about to be reduced, or a replay has reduced it.
void begin_gradient(ParamRecord& record, const c10::Device& device);
// Forget reads at the boundaries of a capture: captured work must not wait for other work, nor vice versa.
void forget_reads(Context& context);
// Parameters whose compute shards a graph reads: copies of them, or the memory itself.
struct Reads {
  std::vector<int64_t> copied, viewed;
};
// Note the reads from now on; reads_noted() returns them.
void begin_noting_reads(Context& context);
Reads reads_noted(const Context& context);
// Raise if a replay of these reads would find a gradient.
void check_readable(const Context& context, const Reads& reads);
// End the backward.
void end_backward(Context& context);
// Return true if the compute shard may be written now.
bool may_write(const ParamRecord& record);
// Raise if param.grad holds a former gradient whose memory is a compute shard again.
void check_is_gradient(const ParamRecord& record);
[[noreturn]] void raise_in_use(const ParamRecord& record);

}  // namespace lightning_zero::grad_aliasing
