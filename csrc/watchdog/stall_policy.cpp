#include "watchdog/stall_policy.h"

#include <algorithm>
#include <utility>

#include "watchdog/rank_state.h"

namespace lightning_zero {

namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr milliseconds kStuckTime{4000};  // without changes before a deadlock is reported
constexpr milliseconds kIdleTime{2000};   // without changes before idle ranks are reported
constexpr milliseconds kDeviceStuckTime{
    60000};  // before a deadlock with waiting devices is reported: hosts may still continue
constexpr double kLookAfter = 2;     // seconds of a wait before other ranks' states are read
constexpr double kReportAgain = 10;  // factor between successive reports

}  // namespace

void StallPolicy::set_report_interval(double report_s) {
  if (report_s == report_.count())
    return;
  report_ = duration<double>(report_s);
  reported_after_ = report_s;
  still_after_ = 0;
}

void StallPolicy::note_progress(const std::vector<RankStatus>& all) {
  std::vector<int64_t> moves;
  for (const auto& status : all) moves.push_back(status.has_task() ? status.task.updates : 0);
  task_updates_.resize(all.size());
  if (std::exchange(task_updates_, moves) == moves)
    return;
  moved_since_ = Clock::now();  // by this host's clock
  reported_after_ = report_.count();
}

StallPolicy::Finding StallPolicy::check(const RankStatus& mine,
                                        const std::function<std::vector<RankStatus>()>& statuses) {
  Finding found;
  const auto now = Clock::now();
  const auto wall = seconds_since_epoch();
  if (mine.activity != seen_activity_) {
    seen_activity_ = mine.activity;
    quiet_since_ = now;
    reported_after_ = report_.count();
    stuck_at_.clear();
  }
  const double quiet = duration<double>(now - quiet_since_).count();
  double waited = mine.is_waiting() ? wall - mine.wait.since : 0;
  const bool watched = mine.phase != Phase::OUTSIDE || mine.is_waiting() || mine.has_task();
  const bool excused = !mine.busy.empty() && !mine.has_task();  // its progress is unknown
  if (!watched || excused || now < next_look_ || (waited < kLookAfter && quiet < report_.count()))
    return found;
  next_look_ = now + milliseconds(1000 + 20 * size_);  // limits the load of the store with many ranks
  const auto all = statuses();
  note_progress(all);
  const double unmoved = duration<double>(now - moved_since_).count();
  waited = std::min(waited, unmoved);
  const bool missed = std::any_of(all.begin(), all.end(), [&](const RankStatus& other) {
    return other.rank != rank_ && other.is_waiting() && wall - other.wait.since > report_.count();
  });
  std::vector<int64_t> at;
  bool devices = false;
  for (const auto& status : all) {
    at.push_back(status.activity);
    devices = devices || status.wait.on_device;
  }
  if (std::exchange(all_at_, at) != at)
    still_since_ = now;
  // Collectives of the module or of callbacks are not observed. Long computations look the same, so reports
  // become less frequent.
  const bool still = is_idle(all) && quiet > still_after_ && now - still_since_ > kIdleTime;
  if (still)
    still_after_ = kReportAgain * quiet;
  const double blocked_s =
      std::max(missed ? std::min(quiet, unmoved) : 0, mine.has_task() && !mine.is_waiting() ? quiet : 0);
  if (still || std::max(waited, blocked_s) > reported_after_) {
    reported_after_ = kReportAgain * std::max(waited, quiet);
    found.report = std::string("No progress. ") +
                   (still ? "Every rank computes, or waits in an operation that is not observed. " : "") +
                   "This is " + format_report(all, rank_, wall);
  }
  if (waited > timeout_.count()) {
    found.kind = "timeout";
    found.text = "A wait took longer than the timeout of " +
                 std::to_string(static_cast<int64_t>(timeout_.count())) + " s. This is " +
                 format_report(all, rank_, wall);
    return found;
  }
  if (!is_deadlock(all)) {
    stuck_at_.clear();
    return found;
  }
  if (at != stuck_at_) {
    stuck_at_ = std::move(at);
    stuck_since_ = now;
  } else if (now - stuck_since_ > (devices ? kDeviceStuckTime : kStuckTime)) {
    found.kind = "mismatch";
    found.text = "Ranks wait for each other at different points, and none can continue. This is " +
                 format_report(all, rank_, wall) +
                 " If weights are all-gathered, every rank must read the same modules in the same order, "
                 "run the same number of forward and backward passes, and compute the same norms and sums "
                 "of parameters: look for branches that depend on the data or on the rank. In manual "
                 "optimization, a rank without a loss must run the same forward, and "
                 "`self.manual_backward(0 * loss)`.";
  }
  return found;
}

}  // namespace lightning_zero
