// The gradients' part in captured graphs. See [Note: captured graphs] in cuda_graph/recorder.h.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradients/reducer.h"

namespace lightning_zero {

class GradientRecording {
 public:
  GradientRecording(Context& context, Transports& transports, Reducer& reducer)
      : context_(context), transports_(transports), reducer_(reducer) {}

  // What a graph does to gradients.
  struct Recorded {
    bool adding = false;             // to those that are there, rather than in their place
    bool deferred = false;           // adds to what waits here; see [Note: deferred gradients]
    bool taking = false;             // takes what has been deferred along
    int64_t layout = 0;              // of buckets
    std::vector<const void*> grads;  // where they lie
    std::vector<int64_t> arrivals;   // empty: a forward, or the backward of frozen weights
    size_t begin = 0, end = 0;       // of the buckets that it launches
    ReduceTransport::Traffic traffic;
  };

  // Why none can begin now; empty when it can.
  // `segment`: whose gradients are to be recorded, as Reducer::mark() said; -1: of the first one, or none.
  std::string disabled_reason(int64_t segment) const;
  void begin(bool backward, bool adding, int64_t segment);
  // Launches what is complete; why a replay would not do the same, empty when it would.
  std::string finish();
  Recorded end();
  void abort();  // harmless where nothing is recorded

  // Whether no replay fits any more; and whether this one does.
  bool is_stale() const { return reducer_.layout().is_stale(); }
  bool fits(const Recorded& graph) const;
  // For a backward; before it: joins autograd's, sends what lies before its gradients, and sees to it that
  // these are added, or not.
  void before_replay(const Recorded& graph);
  void after_replay(const Recorded& graph);
  // The backward in which something was replayed is over, or has been interrupted.
  void forget_replay() { overwritten_.clear(); }

 private:
  void come_to(size_t bucket);
  void make_way(const Recorded& graph);
  std::pair<BucketLayout::Position, bool> within(const Recorded& graph, int64_t index);
  void restore();
  void note_deferred(const Recorded& graph);

  Context& context_;
  Transports& transports_;
  Reducer& reducer_;
  Recorded recorded_;
  // What goes on around the recording.
  Backward around_;
  std::vector<ReduceBucket> buckets_around_, late_around_;
  // By parameter: `filled` and `version` of DeferredGradient, and what lies where its compute copy belongs.
  std::vector<std::tuple<bool, int64_t, InCopy>> records_around_;
  BufferPools::Pools pools_around_;
  // Gradients, and what was there before a replay that overwrites it.
  std::vector<std::pair<at::Tensor, at::Tensor>> overwritten_;
};

}  // namespace lightning_zero
