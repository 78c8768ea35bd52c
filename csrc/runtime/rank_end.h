// Whether this rank must not go on, and why. See [Note: how ranks end] in runtime/watchdog.h.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "runtime/rank_activity.h"

namespace lightning_zero {

// All methods may be called from any thread.
class RankEnd {
 public:
  using Clock = std::chrono::steady_clock;

  // `activity`: of the rank, whose devices are let through their barriers once it ends.
  explicit RankEnd(RankActivity& activity) : activity_(activity) {}

  // Name of an op `(str kind, str text) -> ()` that raises. Without one a plain error is thrown.
  void on_abort(std::string op);
  // A stage begins: what failed before is over.
  void begin();
  // This rank has failed by itself. Returns whether the others are to be told.
  bool fail();
  // It ends because of others, and must have come to its own end by `deadline`.
  void decide(const std::string& kind, const std::string& text, Clock::time_point deadline);
  // This rank need not be given time to fail by itself.
  void skip_grace_period() { hurried_.store(true, std::memory_order_relaxed); }

  // Throws once it must not go on.
  void check();
  // Throws, as check() does.
  [[noreturn]] void raise(const std::string& kind, const std::string& text) const;
  std::string abort_reason() const;  // why; empty while nothing is wrong

  bool has_failed() const;
  bool is_ending() const { return ending_; }
  bool is_hurried() const { return hurried_; }
  bool is_broken() const;   // it has failed, or ends because of others
  bool is_overdue() const;  // it has been told to end, or could not be, and goes on

 private:
  RankActivity& activity_;
  mutable std::mutex mutex_;  // taken before the activity's
  std::string end_op_;
  bool failed_ = false;  // this rank, by itself
  bool told_ = false;    // a wait has thrown, so that somebody knows that this process should end
  std::atomic<bool> ending_{false}, hurried_{false};
  std::string kind_, text_;
  Clock::time_point deadline_{};
};

}  // namespace lightning_zero
