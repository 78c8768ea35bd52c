// Reduces gradients between hosts. After the ranks of each host have reduced among themselves, ranks with the
// same local rank reduce across hosts. Each receives its part, or all of it with replicas. See [Note: hosts]
// in context.h.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "context.h"
#include "gradients/bucket.h"
#include "tensor_ops.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

// Return the bytes that this rank sends to other hosts.
int64_t bytes_of(const ReduceBucket& bucket) {
  return bucket.chunk() * static_cast<int64_t>(c10::elementSize(bucket.dtype()));
}

// Return true if earlier backwards left deferred gradients on this host.
bool has_deferred(ReduceBucket& bucket) {
  return std::ranges::any_of(bucket.slots(), [](const ReduceBucket::Slot& slot) {
    return slot.record->deferred.filled && !slot.record->deferred.full;
  });
}

class CrossHostReduce : public ReduceTransport {
 public:
  CrossHostReduce(Context& context, Communicator& comm, std::unique_ptr<ReduceTransport> intra_host)
      : context_(context), comm_(comm), intra_host_(std::move(intra_host)) {}

  void reduce(ReduceBucket& bucket) override {
    if (is_single_rank() && !bucket.deferred && !has_deferred(bucket)) {
      bucket.buffer()->pending = send_unreduced(bucket);
      return;
    }
    intra_host_->reduce(bucket);
    if (bucket.deferred)
      return;
    auto& pending = bucket.buffer()->pending;
    pending = comm_.run_after(std::move(pending), [&] { return send(bucket); });
  }

  double scale(at::ScalarType dtype) const override { return intra_host_->scale(dtype); }
  bool averages(at::ScalarType dtype) const override { return intra_host_->averages(dtype); }
  // Replicas all-reduce in place, in one tensor.
  bool uses_own_send_buffers() const override {
    return intra_host_->uses_own_send_buffers() && !(is_single_rank() && context_.replicated);
  }
  int buckets_in_flight() const override { return intra_host_->buckets_in_flight(); }
  // A host waits for its own ranks before it sends, so it must not wait for those without such gradients.
  bool launches_early() const override {
    return has_streams(context_.device) && intra_host_->launches_early();
  }

  void begin_backward() override { intra_host_->begin_backward(); }
  void begin_segment() override { intra_host_->begin_segment(); }
  int64_t barriers_before() const override { return intra_host_->barriers_before(); }
  void forget_barriers() override { intra_host_->forget_barriers(); }
  void begin_recording(bool backward) override { intra_host_->begin_recording(backward); }
  Traffic end_recording() override { return intra_host_->end_recording(); }
  void abort_recording() override { intra_host_->abort_recording(); }
  void after_replay(const Traffic& traffic) override { intra_host_->after_replay(traffic); }

 private:
  bool is_single_rank() const { return context_.intra_host.size == 1; }
  // Return the number of elements that this rank receives.
  int64_t part_of(const ReduceBucket& bucket) const {
    return context_.replicated ? bucket.chunk() : bucket.chunk() / context_.inter_host.size;
  }
  // Send the sums of this host.
  Pending send(ReduceBucket& bucket);
  // With one rank per host, its bucket already is the host's sum. Skipping the copy through float32 saves 16
  // bytes of memory traffic per element.
  Pending send_unreduced(ReduceBucket& bucket);
  // `wire`: the whole bucket in one tensor, which is overwritten; undefined if gradients are sent from
  // separate memory. `received`: part_of() elements for the sums, which are added to the gradient shards
  // times `factor`.
  Pending send(ReduceBucket& bucket, const at::Tensor& wire, const at::Tensor& received, double factor);

  Context& context_;
  Communicator& comm_;
  std::unique_ptr<ReduceTransport> intra_host_;
};

Pending CrossHostReduce::send(ReduceBucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto hosts = context_.inter_host.size;
  const auto sums = bucket.sum_on_host();
  auto wire = tensors::empty(bucket.chunk(), sums.options().dtype(bucket.dtype()));
  if (intra_host_->averages(bucket.dtype()))  // over the ranks of one host; in float32, before rounding
    tensors::multiply(wire, sums, tensors::scalar(1.0 / static_cast<double>(hosts)));
  else
    wire.copy_(sums);
  const auto received = context_.replicated ? wire : tensors::empty(part_of(bucket), wire.options());
  return send(bucket, wire, received, 1.0);
}

Pending CrossHostReduce::send_unreduced(ReduceBucket& bucket) {
  const bool mean = intra_host_->averages(bucket.dtype());
  const double factor = mean ? 1.0 / static_cast<double>(context_.inter_host.size) : 1.0;
  const auto wire = bucket.own_send_buffers ? at::Tensor() : bucket.send();
  return send(bucket, wire, flat_range(bucket.recv(), 0, part_of(bucket)), factor);
}

Pending CrossHostReduce::send(ReduceBucket& bucket, const at::Tensor& wire, const at::Tensor& received,
                              double factor) {
  const bool own = !wire.defined();  // otherwise the read has already been recorded
  const auto accumulate = [this, &bucket, factor, own](const at::Tensor& sums) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    bucket.accumulate(0, sums.numel(), make_product(sums, factor), /*inter_host=*/true);
    if (own)
      bucket.record_read(current_stream(context_.device));
  };
  if (context_.replicated) {
    // An all-reduce crosses twice: reduce-scatter and all-gather.
    context_.count("reduce_bytes_across", 2 * bytes_of(bucket));
    return comm_.all_reduce(wire, [accumulate, wire] { accumulate(wire); });
  }
  std::vector<at::Tensor> outputs, inputs;
  for (size_t index = 0; index < bucket.slots().size(); ++index) {
    const auto& slot = bucket.slots()[index];
    outputs.push_back(
        flat_range(received, slot.offset / context_.inter_host.size, slot.record->shard_numel()));
    inputs.push_back(own ? bucket.send_slice(index)
                         : flat_range(wire, slot.offset, slot.record->host_shard_numel()));
  }
  context_.count("reduce_bytes_across", bytes_of(bucket));
  return comm_.reduce_scatter_group(std::move(outputs), std::move(inputs), wire,
                                    [accumulate, received] { accumulate(received); });
}

}  // namespace

std::unique_ptr<ReduceTransport> make_cross_host_reduce(Context& context, Communicator& comm,
                                                        std::unique_ptr<ReduceTransport> intra_host) {
  return std::make_unique<CrossHostReduce>(context, comm, std::move(intra_host));
}

}  // namespace lightning_zero
