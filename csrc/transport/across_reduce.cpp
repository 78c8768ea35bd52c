// Gradients between hosts: what the ranks of each have reduced among themselves is reduced once more, among
// the ranks at one place of all hosts: each takes its part of it, or, where hosts hold replicas, all of it.
// See [Note: hosts] in context.h.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "context.h"
#include "gradients/bucket.h"
#include "runtime/tensors.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

// That this rank sends to other hosts.
int64_t bytes_of(const ReduceBucket& bucket) {
  return bucket.chunk() * static_cast<int64_t>(c10::elementSize(bucket.dtype()));
}

// Whether earlier backwards have left something for it on this host.
bool has_kept(ReduceBucket& bucket) {
  return std::ranges::any_of(bucket.slots(), [](const ReduceBucket::Slot& slot) {
    return slot.record->deferred.filled && !slot.record->deferred.whole;
  });
}

class AcrossReduce : public ReduceTransport {
 public:
  AcrossReduce(Context& context, Communicator& comm, std::unique_ptr<ReduceTransport> inside)
      : context_(context), comm_(comm), inside_(std::move(inside)) {}

  void reduce(ReduceBucket& bucket) override {
    if (alone() && !bucket.deferred && !has_kept(bucket)) {
      bucket.buffer()->pending = send_as_it_is(bucket);
      return;
    }
    inside_->reduce(bucket);
    if (bucket.deferred)
      return;
    auto& pending = bucket.buffer()->pending;
    pending = comm_.behind(std::move(pending), [&] { return send(bucket); });
  }

  double scale(at::ScalarType dtype) const override { return inside_->scale(dtype); }
  bool takes_mean(at::ScalarType dtype) const override { return inside_->takes_mean(dtype); }
  // Replicas add up in place, and in one piece.
  bool wants_own_send_buffers() const override {
    return inside_->wants_own_send_buffers() && !(alone() && context_.replicated);
  }
  int buckets_in_flight() const override { return inside_->buckets_in_flight(); }
  // A host waits for the ranks of its own before it can send anything to others, and must not wait for those
  // that have no such gradient.
  bool leaves_early() const override { return has_streams(context_.device) && inside_->leaves_early(); }

  void begin_backward() override { inside_->begin_backward(); }
  void begin_segment() override { inside_->begin_segment(); }
  int64_t barriers_before() const override { return inside_->barriers_before(); }
  void forget_barriers() override { inside_->forget_barriers(); }
  void begin_recording(bool backward) override { inside_->begin_recording(backward); }
  Traffic end_recording() override { return inside_->end_recording(); }
  void abort_recording() override { inside_->abort_recording(); }
  void after_replay(const Traffic& traffic) override { inside_->after_replay(traffic); }

 private:
  bool alone() const { return context_.inside.size == 1; }
  // Elements that come to this rank.
  int64_t part_of(const ReduceBucket& bucket) const {
    return context_.replicated ? bucket.chunk() : bucket.chunk() / context_.across.size;
  }
  // What this host has added up.
  Pending send(ReduceBucket& bucket);
  // What the only rank of a host puts into a bucket is the host's sum: copied to itself, to float32 and back
  // it would be the same, for 16 bytes per element of the device's bandwidth.
  Pending send_as_it_is(ReduceBucket& bucket);
  // `wire`: all of it, in one piece, whose contents are lost; undefined where each gradient travels from
  // memory of its own. `received`: of part_of() elements for their sums, which come into the gradient shards
  // times `factor`.
  Pending send(ReduceBucket& bucket, const at::Tensor& wire, const at::Tensor& received, double factor);

  Context& context_;
  Communicator& comm_;
  std::unique_ptr<ReduceTransport> inside_;
};

Pending AcrossReduce::send(ReduceBucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto hosts = context_.across.size;
  const auto sums = bucket.host_sums();
  auto wire = tensors::empty(bucket.chunk(), sums.options().dtype(bucket.dtype()));
  if (inside_->takes_mean(bucket.dtype()))  // of the ranks of one host; in float32, before it is rounded
    tensors::multiply(wire, sums, tensors::scalar(1.0 / static_cast<double>(hosts)));
  else
    wire.copy_(sums);
  const auto received = context_.replicated ? wire : tensors::empty(part_of(bucket), wire.options());
  return send(bucket, wire, received, 1.0);
}

Pending AcrossReduce::send_as_it_is(ReduceBucket& bucket) {
  const bool mean = inside_->takes_mean(bucket.dtype());
  const double factor = mean ? 1.0 / static_cast<double>(context_.across.size) : 1.0;
  const auto wire = bucket.own_send_buffers ? at::Tensor() : bucket.send();
  return send(bucket, wire, piece(bucket.recv(), 0, part_of(bucket)), factor);
}

Pending AcrossReduce::send(ReduceBucket& bucket, const at::Tensor& wire, const at::Tensor& received,
                           double factor) {
  const bool own = !wire.defined();  // otherwise it was told before that they have been read
  const auto accumulate = [this, &bucket, factor, own](const at::Tensor& sums) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    bucket.accumulate(0, sums.numel(), product_of(sums, factor), /*across=*/true);
    if (own)
      bucket.read_by(current_stream(context_.device));
  };
  if (context_.replicated) {
    // It crosses twice: to where a part of it is added up, and back.
    context_.count("reduce_bytes_across", 2 * bytes_of(bucket));
    return comm_.all_reduce(wire, [accumulate, wire] { accumulate(wire); });
  }
  std::vector<at::Tensor> outputs, inputs;
  for (size_t index = 0; index < bucket.slots().size(); ++index) {
    const auto& slot = bucket.slots()[index];
    outputs.push_back(piece(received, slot.offset / context_.across.size, slot.record->shard_numel()));
    inputs.push_back(own ? bucket.run(index) : piece(wire, slot.offset, slot.record->host_shard_numel()));
  }
  context_.count("reduce_bytes_across", bytes_of(bucket));
  return comm_.reduce_scatter_group(std::move(outputs), std::move(inputs), wire,
                                    [accumulate, received] { accumulate(received); });
}

}  // namespace

std::unique_ptr<ReduceTransport> make_across_reduce(Context& context, Communicator& comm,
                                                    std::unique_ptr<ReduceTransport> inside) {
  return std::make_unique<AcrossReduce>(context, comm, std::move(inside));
}

}  // namespace lightning_zero
