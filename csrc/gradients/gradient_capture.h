// The gradients' part of captured graphs. See [Note: CUDA graphs] in cuda/graph_recorder.h.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradients/reducer.h"

namespace lightning_zero {

class GradientCapture {
 public:
  GradientCapture(Context& context, Transports& transports, Reducer& reducer)
      : context_(context), transports_(transports), reducer_(reducer) {}

  // The effects of a graph on gradients.
  struct Recorded {
    bool adding = false;             // to existing gradients, instead of overwriting them
    bool deferred = false;           // adds to deferred gradients, see [Note: deferred gradients]
    bool sends_deferred = false;     // sends deferred gradients
    int64_t layout = 0;              // version of the bucket layout
    std::vector<const void*> grads;  // their addresses
    std::vector<int64_t> arrivals;   // empty: a forward, or the backward of frozen weights
    size_t begin = 0, end = 0;       // range of buckets that it launches
    ReduceTransport::Traffic traffic;
  };

  // Return the reason against a capture now; empty if there is none. `segment`: id of the captured gradients,
  // from Reducer::segment(); -1: the first segment, or none.
  std::string disabled_reason(int64_t segment) const;
  void begin(bool backward, bool adding, int64_t segment);
  // Launch complete buckets. Return the reason why a replay would differ; empty if there is none.
  std::string finish();
  Recorded end();
  void abort();  // no effect without a capture

  // Return true if no graph can be replayed, or if this one can.
  bool is_stale() const { return reducer_.layout().is_stale(); }
  bool fits(const Recorded& graph) const;
  // Before a backward's replay: join autograd's backward, launch earlier buckets, and prepare gradients to be
  // added or overwritten.
  void before_replay(const Recorded& graph);
  void after_replay(const Recorded& graph);
  // The backward with a replay has ended or was interrupted.
  void clear_replay() { overwritten_.clear(); }

 private:
  void launch_up_to(size_t bucket);
  void move_to_late_buckets(const Recorded& graph);
  std::pair<BucketLayout::Position, bool> find_slot(const Recorded& graph, int64_t index);
  void restore();
  void note_deferred(const Recorded& graph);

  Context& context_;
  Transports& transports_;
  Reducer& reducer_;
  Recorded recorded_;
  // State outside of the capture.
  Backward outer_backward_;
  std::vector<ReduceBucket> outer_buckets_, outer_late_buckets_;
  // By parameter: `filled` and `version` of DeferredGradient, `state` and `gradient_arrived` of the compute
  // shard.
  std::vector<std::tuple<bool, int64_t, ComputeShardState, bool>> outer_records_;
  BufferPools::Pools outer_pools_;
  // Gradients, with their values before a replay overwrites them.
  std::vector<std::pair<at::Tensor, at::Tensor>> overwritten_;
};

}  // namespace lightning_zero
