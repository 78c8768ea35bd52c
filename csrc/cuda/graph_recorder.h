// Captures compiled graphs as CUDA graphs, and keeps the executor's state correct around replays.
//
// [Note: CUDA graphs] The forward and backward of a compiled graph may be captured as CUDA graphs and
// replayed. During a capture, ops queue the same work as usual but communicate with no other rank on the
// host. Each part of the executor records the state changes of the run. A replay has three steps.
// before_replay() does the work that differs each time: synchronize with peers whose memory is read, join
// autograd's backward, and decide whether gradients are added. Then the graph runs. after_replay() applies
// the recorded state changes. The queued work is the same, so one rank may replay what another runs; for
// collectives see [Note: collectives in graphs]. Only backwards whose gradients fill whole buckets can be
// captured: see [Note: segments of a backward] in gradients/layout.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gradients/grad_aliasing.h"
#include "gradients/gradient_capture.h"
#include "weights/weights.h"

namespace lightning_zero {

class WeightCapture {
 public:
  WeightCapture(Context& context, Weights& weights) : context_(context), weights_(weights) {}

  // The weights' part of a captured graph.
  struct Recorded {
    UnshardedCache::Recorded unsharded_cache;
    HostExchange::Recorded exchange;
    grad_aliasing::Reads reads;  // of compute shards that gradients may alias
    GatherLog::Entries gathers;
  };

  // Return the reason against a capture now; empty if there is none.
  std::string disabled_reason() const;
  void begin();
  // Return the reason why a replay would differ; empty if there is none.
  std::string finish() const;
  Recorded end();

  // Return true if a replay reads valid weights. `gathered`: indices of weights that earlier graphs gather;
  // the graph's own are added.
  bool fits(const Recorded& graph, std::set<int64_t>& gathered) const;
  // The graph was only captured, so the weights that it gathers are not valid.
  void mark_not_run(const Recorded& graph) { weights_.unsharded_cache().mark_not_run(graph.unsharded_cache); }
  // Let peers agree that the weights are new and readable.
  void before_replay(const Recorded& graph);
  void after_replay(const Recorded& graph) { weights_.unsharded_cache().after_replay(graph.unsharded_cache); }

 private:
  Context& context_;
  Weights& weights_;
  size_t gathered_before_ = 0;  // see GatherLog
};

class GraphRecorder {
 public:
  GraphRecorder(Context& context, Communicators& communicators, Transports& transports, Weights& weights,
                Reducer& reducer)
      : context_(context),
        communicators_(communicators),
        weights_(context, weights),
        gradients_(context, transports, reducer) {}

  // Return the reason against a capture now; empty if there is none. `segment`: see begin().
  std::string disabled_reason(int64_t segment) const;
  // Return the reason why collectives of weights or gradients can never be captured; empty if there is none.
  std::string no_collectives_reason() const { return communicators_.no_capture_reason(); }
  // Begin a capture. `adding`: gradients are added to existing ones. `segment`: id of the captured part of a
  // backward, from Reducer::segment(); -1: the first.
  void begin(bool backward, bool adding, int64_t segment);
  int64_t end();  // returns the graph's id; throws NotImplementedError if a replay would differ
  void abort();   // no effect without a capture

  // Return true if replays of these graphs would do the same as runs.
  bool fits(int64_t forward, int64_t backward) const;
  void mark_not_run(int64_t graph);  // it was only captured
  void drop(int64_t graph);
  void before_replay(int64_t graph);
  void after_replay(int64_t graph);
  // Drop state of a replay that did not happen.
  void clear_replay() { gradients_.clear_replay(); }
  void close();

 private:
  struct Recorded {
    GradientCapture::Recorded gradients;
    WeightCapture::Recorded weights;
    CollectiveCounts collectives;
    std::map<std::string, int64_t> counters;
  };
  const Recorded& recorded(int64_t graph) const;

  Context& context_;
  Communicators& communicators_;
  WeightCapture weights_;
  GradientCapture gradients_;
  bool recording_ = false;
  std::map<std::string, int64_t> counters_;  // from outside of the capture
  std::map<int64_t, Recorded> graphs_;       // by id
  int64_t made_ = 0;
};

}  // namespace lightning_zero
