// Reduces gradients of a single rank: there is nothing to send, so they are added from where they lie.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "context.h"
#include "gradients/bucket.h"
#include "transport/communicator.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

class SingleRankReduce : public ReduceTransport {
 public:
  SingleRankReduce(const Context& context, Communicator& comm) : context_(context), comm_(comm) {}

  void reduce(ReduceBucket& bucket) override {
    bucket.buffer()->pending = comm_.run([this, &bucket] {
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      bucket.accumulate_sent();
      bucket.record_read(current_stream(context_.device));
    });
  }
  double scale(at::ScalarType) const override { return 1.0; }
  bool averages(at::ScalarType) const override { return true; }
  bool uses_own_send_buffers() const override { return has_streams(context_.device); }  // for zero-copy
  int buckets_in_flight() const override { return 2; }

 private:
  const Context& context_;
  Communicator& comm_;
};

}  // namespace

std::unique_ptr<ReduceTransport> make_single_rank_reduce(const Context& context, Communicator& comm) {
  return std::make_unique<SingleRankReduce>(context, comm);
}

}  // namespace lightning_zero
