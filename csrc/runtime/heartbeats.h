// Whether the next host is there. Of what runs there nobody sees the processes, and where all of them are
// gone none is left to tell; NCCL waits for them as long as it is told to.
//
// Every rank writes down, once a second, that it is there, and looks at the one at its place of the next
// host: so each is looked at by one, however many hosts there are. The watchdog's thread does that, which a
// rank that computes, hangs, or holds Python's lock does not keep from it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace lightning_zero {

class RankStateStore;

// For one thread.
class Heartbeats {
 public:
  // `hosts`: of each rank, the number of its host, of which there are several.
  Heartbeats(int64_t rank, const std::vector<int64_t>& hosts);

  bool reported = false;  // that it is silent, to whom this rank talks

  // The rank that this one looks at.
  int64_t watched() const { return watched_; }
  // Beats, and looks: for how many seconds that rank has not. 0 until it has begun. Time in which this rank
  // itself did nothing does not count: somebody may have stopped all of them.
  double seconds_since_heartbeat(RankStateStore& store);
  // That rank has a reason to be silent so far.
  void reset() { silent_ = 0; }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t watched_;
  Clock::time_point looked_{}, beaten_{};
  std::string last_;
  double silent_ = 0;
};

}  // namespace lightning_zero
