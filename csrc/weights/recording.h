// The weights' part in captured graphs. See [Note: captured graphs] in cuda_graph/recorder.h.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "weights/weights.h"

namespace lightning_zero {

class WeightRecording {
 public:
  WeightRecording(Context& context, Weights& weights) : context_(context), weights_(weights) {}

  // What a graph does with weights.
  struct Recorded {
    ResidentWeights::Recorded resident;
    Exchange::Recorded exchange;
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

}  // namespace lightning_zero
