#include "runtime/wait_judge.h"

#include <algorithm>
#include <utility>

#include "runtime/rank_waits.h"

namespace lightning_zero {

namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr milliseconds kStuck{4000};         // for which nothing moves before a deadlock is called one
constexpr milliseconds kStill{2000};         // for which no rank has moved, nor waits where that is seen
constexpr milliseconds kDeviceStuck{60000};  // the same where devices wait: their hosts may still come round
constexpr double kLookAfter = 2;             // seconds of a wait after which the others are looked at
constexpr double kReportAgain = 10;          // times the time until the first report

}  // namespace

void WaitJudge::set_report_interval(double report_s) {
  if (report_s == report_.count())
    return;
  report_ = duration<double>(report_s);
  reported_after_ = report_s;
  still_after_ = 0;
}

void WaitJudge::look_for_moves(const std::vector<RankStatus>& all) {
  std::vector<int64_t> moves;
  for (const auto& status : all) moves.push_back(status.moves() ? status.task.moves : 0);
  moves_.resize(all.size());
  if (std::exchange(moves_, moves) == moves)
    return;
  moved_since_ = Clock::now();  // by this host's clock
  reported_after_ = report_.count();
}

WaitJudge::Finding WaitJudge::look(const RankStatus& mine,
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
  double waited = mine.waits() ? wall - mine.wait.since : 0;
  const bool watched = mine.phase != Phase::OUTSIDE || mine.waits() || mine.moves();
  const bool excused = !mine.busy.empty() && !mine.moves();  // nobody knows how far it is
  if (!watched || excused || now < next_look_ || (waited < kLookAfter && quiet < report_.count()))
    return found;
  next_look_ = now + milliseconds(1000 + 20 * size_);  // so that many ranks do not keep the store busy
  const auto all = statuses();
  look_for_moves(all);
  const double unmoved = duration<double>(now - moved_since_).count();
  waited = std::min(waited, unmoved);
  const bool missed = std::any_of(all.begin(), all.end(), [&](const RankStatus& other) {
    return other.rank != rank_ && other.waits() && wall - other.wait.since > report_.count();
  });
  std::vector<int64_t> at;
  bool devices = false;
  for (const auto& status : all) {
    at.push_back(status.activity);
    devices = devices || status.wait.on_device;
  }
  if (std::exchange(all_at_, at) != at)
    still_since_ = now;
  // A collective of the module's own, or of a callback's, is nothing that anybody here sees. Long
  // computations look the same, so this is said less and less often.
  const bool still = is_still(all) && quiet > still_after_ && now - still_since_ > kStill;
  if (still)
    still_after_ = kReportAgain * quiet;
  const double held =
      std::max(missed ? std::min(quiet, unmoved) : 0, mine.moves() && !mine.waits() ? quiet : 0);
  if (still || std::max(waited, held) > reported_after_) {
    reported_after_ = kReportAgain * std::max(waited, quiet);
    found.report = std::string("No progress. ") +
                   (still ? "Every rank computes, or waits in something that is not watched. " : "") +
                   "This is " + report(all, rank_, wall);
  }
  if (waited > timeout_.count()) {
    found.kind = "timeout";
    found.text = "A wait took longer than the timeout of " +
                 std::to_string(static_cast<int64_t>(timeout_.count())) + " s. This is " +
                 report(all, rank_, wall);
    return found;
  }
  if (!is_deadlock(all)) {
    stuck_at_.clear();
    return found;
  }
  if (at != stuck_at_) {
    stuck_at_ = std::move(at);
    stuck_since_ = now;
  } else if (now - stuck_since_ > (devices ? kDeviceStuck : kStuck)) {
    found.kind = "mismatch";
    found.text =
        "Ranks wait for each other at different places, and would for ever. This is " +
        report(all, rank_, wall) +
        " Every rank must read the same modules in the same order where weights are all-gathered, and "
        "run as many forward and backward passes, and take norms and sums of parameters on every rank: "
        "look for branches that depend on the data or on the rank. In manual optimization, a rank without a "
        "loss runs the same forward, and `self.manual_backward(0 * loss)`.";
  }
  return found;
}

}  // namespace lightning_zero
