// The weights' part in captured graphs. See [Note: captured graphs] in cuda_graph/recorder.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gradients/gradient_capture.h"
#include "weights/weights.h"

namespace lightning_zero {

class WeightCapture {
 public:
  WeightCapture(Context& context, Weights& weights) : context_(context), weights_(weights) {}

  // What a graph does with weights.
  struct Recorded {
    ResidentWeights::Recorded resident;
    HostExchange::Recorded exchange;
    std::vector<int64_t> read;  // copies over which gradients come
    GatherLog::Entries gathers;
  };

  // Why none can begin now; empty when it can.
  std::string disabled_reason() const;
  void begin();
  // Why a replay would not do the same, empty when it would.
  std::string finish() const;
  Recorded end();

  // Whether a replay reads what it should, where `gathered`, by index, has been gathered before; its own is
  // added to that.
  bool fits(const Recorded& graph, std::set<int64_t>& gathered) const;
  // What the graph was to leave behind is not there.
  void mark_not_run(const Recorded& graph) { weights_.resident().mark_not_run(graph.resident); }
  // Does what must be done each time: peers agree that what is read is new, and may be read.
  void before_replay(const Recorded& graph);
  void after_replay(const Recorded& graph) { weights_.resident().after_replay(graph.resident); }

 private:
  Context& context_;
  Weights& weights_;
  size_t gathered_before_ = 0;  // see GatherLog
};

// Compiled code that is replayed as graphs of the device.
//
// [Note: captured graphs] A compiled graph's forward and backward may be captured as graphs of the device and
// replayed. While one is recorded, ops queue what they always queue, but agree on nothing and call nobody;
// what the run would have changed is noted by each owner of state. A replay consists of before_replay(),
// which does what must be done each time anew (synchronise with peers whose copies are read, join autograd's
// backward, decide whether gradients are added), the graph, and after_replay(), which brings the books up to
// date. What is queued is the same, so a rank may replay what another runs; why that is so for collectives,
// too, is said in [Note: collectives in graphs]. Recorded are only backwards whose gradients fill whole
// buckets: see [Note: segments of a backward] in gradients/segments.h.

class GraphRecorder {
 public:
  GraphRecorder(Context& context, Communicators& communicators, Transports& transports, Weights& weights,
                Reducer& reducer)
      : context_(context),
        communicators_(communicators),
        weights_(context, weights),
        gradients_(context, transports, reducer) {}

  // Why nothing can be recorded now; empty when it can. `segment`: see begin().
  std::string disabled_reason(int64_t segment) const;
  // Why collectives, where weights or gradients travel by them, can never be recorded; empty when they can.
  std::string no_collectives_reason() const { return communicators_.no_capture_reason(); }
  // What follows is recorded. `adding`: to the gradients that are there, rather than in their place.
  // `segment`: of a backward, that they are, as Reducer::mark() says where the same code runs; -1: the first.
  void begin(bool backward, bool adding, int64_t segment);
  int64_t end();  // the graph's number; throws NotImplementedError where a replay would not be the same
  void abort();   // harmless where nothing is recorded

  // Whether replays of these would do what runs would.
  bool fits(int64_t forward, int64_t backward) const;
  void mark_not_run(int64_t graph);  // what it was to leave behind is not there
  void drop(int64_t graph);
  void before_replay(int64_t graph);
  void after_replay(int64_t graph);
  // What was kept back for a replay that did not come.
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
  std::map<std::string, int64_t> counters_;  // of what goes on around a recording
  std::map<int64_t, Recorded> graphs_;       // by their numbers
  int64_t made_ = 0;
};

}  // namespace lightning_zero
