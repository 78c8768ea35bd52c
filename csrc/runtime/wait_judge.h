// How long is too long: when a wait is reported, when it is over, and when nobody can go on.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "runtime/rank_status.h"

namespace lightning_zero {

// For one thread. While a rank says that it is farther with what takes long, nobody waits too long for it.
class WaitJudge {
 public:
  // `report_s`: a wait that takes longer is reported; `timeout_s`: one that takes longer ends the process.
  WaitJudge(int64_t rank, int64_t size, double report_s, double timeout_s)
      : rank_(rank), size_(size), report_(report_s), timeout_(timeout_s) {}

  // From the next look on; what has been reported already is reported again after the new time.
  void set_report_interval(double report_s);

  struct Finding {
    std::string report;      // what to say; empty: nothing
    std::string kind, text;  // why this rank must end; empty: it need not
  };
  // `statuses`: asked only when it is time to look at the others, since asking keeps the store busy.
  Finding look(const RankStatus& mine, const std::function<std::vector<RankStatus>()>& statuses);

 private:
  void look_for_moves(const std::vector<RankStatus>& all);

  using Clock = std::chrono::steady_clock;

  int64_t rank_, size_;
  std::chrono::duration<double> report_, timeout_;
  int64_t seen_activity_ = -1;
  Clock::time_point quiet_since_{}, next_look_{};
  double reported_after_ = 0, still_after_ = 0;
  Clock::time_point still_since_{}, stuck_since_{}, moved_since_{};
  std::vector<int64_t> stuck_at_, all_at_;  // activities of all ranks
  std::vector<int64_t> moves_;              // of all ranks' tasks
};

}  // namespace lightning_zero
