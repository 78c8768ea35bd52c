// Replays of graphs in which devices wait for each other in collectives. Nobody else watches over these: a
// process group hears of a collective when it is captured, and never again.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>

#include "runtime/rank_status.h"

namespace lightning_zero {

class ReplayWaits {
 public:
  // `ended`: in memory of the host, how many of all replays that were told of here have ended. The device
  // says so itself: a thread that asked it could be held up by whoever waits for it. `number`: of the last of
  // the replay's meetings in that lane.
  void started(const at::Tensor& ended, SequenceId lane, int64_t number);
  void forget();
  // The oldest that has not ended, once it takes long and the host waits for nothing.
  void add_to(RankStatus& status);

 private:
  struct Replay {
    SequenceId lane;
    int64_t number;
    double since;  // it began, or the one before it ended
  };
  void look();

  at::Tensor ended_;
  int64_t seen_ = 0;  // that have ended
  std::deque<Replay> running_;
};

}  // namespace lightning_zero
