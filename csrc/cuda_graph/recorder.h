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
#pragma once

#include <map>
#include <optional>
#include <string>

#include "gradients/recording.h"
#include "weights/recording.h"

namespace lightning_zero {

class Recorder {
 public:
  Recorder(Context& context, Communicators& communicators, Transports& transports, Weights& weights,
           Reducer& reducer)
      : context_(context),
        communicators_(communicators),
        weights_(context, weights),
        gradients_(context, transports, reducer) {}

  // Why nothing can be recorded now; empty when it can. `segment`: see begin().
  std::string disabled_reason(int64_t segment) const;
  // Why collectives, where weights or gradients travel by them, can never be recorded; empty when they can.
  std::string no_collectives_reason() const { return communicators_.why_not_captured(); }
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
  void forget_replay() { gradients_.forget_replay(); }
  void close();

 private:
  struct Recorded {
    GradientRecording::Recorded gradients;
    WeightRecording::Recorded weights;
    Meetings meetings;
    std::map<std::string, int64_t> counters;
  };
  const Recorded& recorded(int64_t graph) const;

  Context& context_;
  Communicators& communicators_;
  WeightRecording weights_;
  GradientRecording gradients_;
  bool recording_ = false;
  std::map<std::string, int64_t> counters_;  // of what goes on around a recording
  std::map<int64_t, Recorded> graphs_;       // by their numbers
  int64_t made_ = 0;
};

}  // namespace lightning_zero
