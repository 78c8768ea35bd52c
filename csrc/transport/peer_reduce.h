// Gradients by plain copies into every rank's memory: a one-sided reduce-scatter.
//
// [Note: one-sided reduce-scatter] Where ranks can write into each other's memory, a bucket is not
// reduce-scattered: each rank copies every peer's part into that peer's staging memory, all pass a barrier,
// and each adds up what it was sent, in float32. Staging memory has two halves, used in turn: whoever passes
// the barrier of one round knows that all have added up the round before it, so its half may be written
// again.
#pragma once

#include <vector>

#include "context.h"
#include "transport/communicator.h"
#include "transport/row_means.h"
#include "transport/transport.h"

namespace lightning_zero {

class PeerReduce : public ReduceTransport {
 public:
  // `staging`: memory of each rank, as bytes, a multiple of unit() long. `means`: may become others later.
  PeerReduce(const Context& context, Communicator& comm, const RowMeans& means,
             std::vector<at::Tensor> staging);

  // Bytes: both halves hold whole pieces of every rank, of any dtype.
  static int64_t unit(int64_t ranks);

  void reduce(ReduceBucket& bucket) override;
  double scale(at::ScalarType) const override { return 1.0; }
  bool averages(at::ScalarType) const override { return true; }
  bool uses_own_send_buffers() const override { return true; }
  int buckets_in_flight() const override { return 4; }  // they hold no memory of their own
  // A host that waits for its peers in each round must not wait for those that have no such gradient.
  bool launches_early() const override { return has_streams(context_.device) || context_.intra_host.size == 1; }

  void begin_backward() override;
  void begin_segment() override { rounds_ = 0; }
  int64_t barriers_before() const override { return barriers_before_; }
  void forget_barriers() override { barriers_ = 0; }

  void begin_recording(bool backward) override;
  Traffic end_recording() override;
  void abort_recording() override { barriers_ = barriers_recorded_; }
  void after_replay(const Traffic& traffic) override;

 private:
  void barrier();
  // Elements from `begin` on, `width` of each rank's part.
  void send_round(ReduceBucket& bucket, int64_t begin, int64_t width);

  const Context& context_;
  Communicator& comm_;
  const RowMeans& means_;
  std::vector<at::Tensor> staging_;  // by rank
  int64_t rounds_ = 0;               // this segment of a backward
  int64_t barriers_ = 0;             // of all ranks, ever,
  int64_t barriers_before_ = 0;      // before this backward,
  int64_t barriers_recorded_ = 0;    // and before what is being recorded
};

}  // namespace lightning_zero
