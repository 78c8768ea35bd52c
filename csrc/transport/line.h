// The one line in which what waits for other ranks stands in a graph of the device.
//
// [Note: collectives in graphs] The kernel of a collective, and that of a barrier, holds its place on the
// device until all ranks have come to theirs. On several branches of a graph such kernels might come in
// another order on each rank, or stand in one of the device's queues before what a peer waits for; nobody
// would ever go on. So while a graph is recorded, all of them, of weights and of gradients, come one behind
// the other, in the order in which they were launched: C1, C2, ... Nothing else is put in line: copies, sums
// and what the model computes go on beside them.
//
// Why nobody waits for ever. What C(i) needs on a rank (its ancestors in the graph) comes before C(i), and so
// before every C(j), j >= i, in any order in which a queue can hold the graph's nodes, since that order is
// one of the graph's own. Only C(j) with j < i can stand in its way. Take the first collective that is not
// over on all ranks: those before it are, so on each rank what it needs gets done and it begins; and once it
// has begun everywhere, it ends.
//
// The same holds for a rank that runs what others replay. It launches the same collectives in the same order
// (ranks have agreed on the plan), on two streams, and each behind what it needs: whatever stands before C(i)
// in a queue was launched before it. That a later one may begin earlier there does no harm, as it does none
// where all ranks run. So ranks need not agree on who replays and who runs: one may still be warming up, have
// failed to capture, or have a batch of another length, and the lengths of batches change no collective.
//
// That takes collectives that do the same in a graph and outside. NCCL's do, unless it registers the memory
// that graphs name (NCCL_GRAPH_REGISTER, which is on by default): then it exchanges addresses while it is
// captured, and uses other channels. See Communicator::why_not_captured.
#pragma once

#include <utility>

#include "runtime/device.h"
#include "runtime/rank_status.h"

namespace lightning_zero {

// Of ranks, in which their devices wait for each other.
struct Meetings {
  int64_t gathers = 0, reduces = 0;
  bool gathers_across = false;  // some of these are of several hosts
  bool any() const { return gathers + reduces > 0; }
};

class Line {
 public:
  void begin_recording() { recording_ = true; }
  // What a replay will have of them, which recording had not.
  Meetings end_recording() {
    recording_ = false;
    last_ = {};
    return std::exchange(meetings_, {});
  }
  void add(SequenceId lane) { ++(lane == SequenceId::GATHER ? meetings_.gathers : meetings_.reduces); }

  // Around the launch of what waits for other ranks, on `stream`. Nothing where nothing is recorded.
  void enter(const c10::Stream& stream) const { last_.block(stream); }
  void leave(const c10::Stream& stream) {
    if (recording_)
      last_.record(stream);
  }

 private:
  bool recording_ = false;
  Fence last_;
  Meetings meetings_;
};

}  // namespace lightning_zero
