// Decides whether this rank must not continue, and why. See [Note: how ranks end] in watchdog.h.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "watchdog/rank_activity.h"

namespace lightning_zero {

// Any thread may call any method.
class RankAbort {
 public:
  using Clock = std::chrono::steady_clock;

  // `activity`: of this rank, whose devices are released from barriers at an abort.
  explicit RankAbort(RankActivity& activity) : activity_(activity) {}

  // Set an op `(str kind, str text) -> ()` that raises. Without one, check() throws a plain error.
  void on_abort(std::string op);
  // Begin a stage: earlier failures no longer count.
  void begin_stage();
  // This rank has failed by itself. Return true if the others must be told.
  bool fail();
  // Abort this rank because of others. It must end by itself before `deadline`.
  void abort(const std::string& kind, const std::string& text, Clock::time_point deadline);
  // Do not give this rank time to fail by itself.
  void skip_grace_period() { skip_grace_.store(true, std::memory_order_relaxed); }

  // Throw if this rank must not continue.
  void check();
  // Throw, as check() does.
  [[noreturn]] void raise(const std::string& kind, const std::string& text) const;
  std::string abort_reason() const;  // empty without an abort

  bool has_failed() const;
  bool is_ending() const { return ending_; }
  bool skips_grace() const { return skip_grace_; }
  bool has_ended() const;   // failed or aborted
  bool is_overdue() const;  // aborted, and still running after the deadline

 private:
  RankActivity& activity_;
  mutable std::mutex mutex_;  // locked before the activity's mutex
  std::string abort_op_;
  bool failed_ = false;  // this rank, by itself
  bool raised_ = false;  // a wait has thrown, so the caller knows that the process should end
  std::atomic<bool> ending_{false}, skip_grace_{false};
  std::string kind_, text_;
  Clock::time_point deadline_{};
};

}  // namespace lightning_zero
