// Decides when a wait is reported, when it times out, and when no rank can continue.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "watchdog/rank_state.h"

namespace lightning_zero {

// For one thread. A wait for a task that reports progress does not time out.
class StallPolicy {
 public:
  // `report_s`: seconds after which a wait is reported. `timeout_s`: seconds after which it ends the process.
  StallPolicy(int64_t rank, int64_t size, double report_s, double timeout_s)
      : rank_(rank), size_(size), report_(report_s), timeout_(timeout_s) {}

  // Takes effect at the next check. Waits that were already reported are reported again after the new time.
  void set_report_interval(double report_s);

  struct Finding {
    std::string report;      // text to print; empty: none
    std::string kind, text;  // reason to abort this rank; empty: none
  };
  // `statuses`: called only if other ranks' states are needed, because reading them loads the store.
  Finding check(const RankStatus& mine, const std::function<std::vector<RankStatus>()>& statuses);

 private:
  void note_progress(const std::vector<RankStatus>& all);

  using Clock = std::chrono::steady_clock;

  int64_t rank_, size_;
  std::chrono::duration<double> report_, timeout_;
  int64_t seen_activity_ = -1;
  Clock::time_point quiet_since_{}, next_look_{};
  double reported_after_ = 0, still_after_ = 0;
  Clock::time_point still_since_{}, stuck_since_{}, moved_since_{};
  std::vector<int64_t> stuck_at_, all_at_;  // activities of all ranks
  std::vector<int64_t> task_updates_;       // of all ranks' tasks
};

}  // namespace lightning_zero
