// Gradients that lie where the compute copies of their weights lay.
//
// [Note: gradients over copies] Once a backward has computed with a weight for the last time, nobody reads
// its compute copy until the optimizer has stepped; and its gradient, reduced, has as many elements. So the
// gradient may lie there, in the copy's dtype, and takes no memory of its own. `grad` is the copy's memory
// then, and whoever comes next, who finds the copy stale anyway, writes it anew.
//
// What makes it safe: a bucket is reduced on this rank once all ranks have sent theirs, and each sends it
// behind its own last read of these weights, for which launching waits. A read that comes later still, in the
// same backward or before the step, would find the gradient's bits. Where ranks read each other's shards, or
// all-gather, weights come from shards then; elsewhere, and in what is replayed, the read is refused. While
// somebody may want the gradient, nobody writes the copy; one that is not in param.grad nobody wants, and its
// copy is stale.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"
#include "transport/pending.h"

namespace lightning_zero::grad_aliasing {

// Refuses a copy that is about to be read and is a gradient.
void check_is_weight(const ParamRecord& record);
// It is read until `pending` is over.
void note_read_until(ParamRecord& record, const Pending& pending);
// The parameter's gradient is about to be reduced, or was by a replay.
void begin_gradient(ParamRecord& record, const c10::Device& device);
// What is queued from here on is recorded, or was: it must not wait for what is not, nor the other way round.
void forget_reads(Context& context);
// Parameters whose copies were read since note_reads().
void begin_noting_reads(Context& context);
std::vector<int64_t> parameters_read(const Context& context);
// The backward is over.
void end_backward(Context& context);
// Whether the copy may be written now.
bool may_write(const ParamRecord& record);
// Refuses what is in param.grad and was a gradient, until its copy was written.
void check_is_gradient(const ParamRecord& record);
[[noreturn]] void raise_in_use(const ParamRecord& record);

}  // namespace lightning_zero::grad_aliasing
