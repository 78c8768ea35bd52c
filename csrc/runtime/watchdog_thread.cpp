// The Watchdog's thread: looks around twice a second. See watchdog.h.
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "runtime/heartbeats.h"
#include "runtime/rank_board.h"
#include "runtime/rank_waits.h"
#include "runtime/watchdog.h"

namespace lightning_zero {

namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using Clock = Watchdog::Clock;

constexpr milliseconds kTick{500};
constexpr milliseconds kGracePeriod{3000};  // that a rank gets to fail by itself once another has
constexpr milliseconds kExitTimeLimit{4000};   // and then to end
constexpr milliseconds kStoreGone{5000};
constexpr milliseconds kDeviceLeft{10000};  // that a rank which has failed gives its device
// Of a rank of another host, in seconds: after which that is said; after which nobody waits any more; and the
// same where a connection is known to be broken.
constexpr double kSilent = 8, kGone = 30, kGoneWhereBroken = 2.5;

}  // namespace

void Watchdog::run() {
  for (bool first = true;; first = false) {
    if (!first) {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kTick, [&] { return closing_; });
      if (closing_)
        break;
    }
    try {
      poll();
      since_.store_lost = {};
    } catch (const std::exception&) {
      if (since_.store_lost == Clock::time_point{})
        since_.store_lost = Clock::now();
      if (Clock::now() - since_.store_lost > kStoreGone && !abort_.is_ending()) {
        if (const auto mine = activity_.status(); mine.phase == Phase::OUTSIDE && !mine.is_waiting())
          break;  // the others have ended, and this rank needs them no more
        abort_rank(
            "failed",
            "The key-value store through which ranks find each other is gone: the process that serves it, "
            "rank 0's or the launcher, has ended. Look for its error first.");
      }
    }
    if (abort_.is_ending() && abort_.is_overdue()) {
      print("This process did not end by itself within " + std::to_string(kExitTimeLimit.count() / 1000) +
          " s and is ended now.");
      kill_forked_children();
      std::_Exit(1);
    }
    exit_if_device_stuck();
  }
  try {
    RankStatus last = activity_.status();
    last.left = true;
    store_->publish(last);
  } catch (const std::exception&) {
    // Nobody is left to be told.
  }
}

// A barrier lets devices pass once a rank has failed, collectives do not: whatever then waits for the device,
// on the way out, would wait for ever.
void Watchdog::exit_if_device_stuck() {
  const auto mine = activity_.status();
  const bool left = abort_.has_failed() && mine.wait.on_device &&
                    mine.wait.sequence < static_cast<int>(SequenceId::DEVICE_REDUCE) &&
                    seconds_since_epoch() - mine.wait.since > duration<double>(kDeviceLeft).count();
  if (!left)
    since_.device_left = {};
  else if (since_.device_left == Clock::time_point{})
    since_.device_left = Clock::now();
  else if (Clock::now() - since_.device_left > kExitTimeLimit) {
    print("This process has failed, and its device waits for other ranks, which do not come. It is ended now. "
        "This is " +
        mine.describe(seconds_since_epoch()) + ".");
    kill_forked_children();
    std::_Exit(1);
  }
}

void Watchdog::poll() {
  const auto mine = activity_.status();
  store_->publish(mine);
  if (abort_.is_ending() || check_failures(mine) || check_processes(mine) || check_heartbeats(mine) ||
      check_backends(mine))
    return;
  {
    std::lock_guard lock(mutex_);
    stall_policy_.set_report_interval(report_s_);
  }
  const auto found = stall_policy_.check(mine, [this] { return store_->statuses(activity_.status()); });
  if (!found.report.empty())
    print(found.report);
  if (!found.kind.empty())
    abort_all(found.kind, found.text);
}

bool Watchdog::check_failures(const RankStatus& mine) {
  if (abort_.has_failed())
    return true;
  if (std::exchange(other_failed_.stage, mine.stage) != mine.stage)
    other_failed_.found.reset();
  if (!store_->any_failed(mine.stage))
    return false;
  for (int64_t other = 0; other < size_ && !other_failed_.found; ++other) {
    if (other == rank_ || !store_->has_failed(mine.stage, other))
      continue;
    const auto failure = store_->failure_of(mine.stage, other);
    other_failed_.found = {
        Clock::now(), failure.kind,
        "Rank " + std::to_string(other) + (failure.kind == "gone" ? " says: " : " failed: ") + failure.text};
  }
  // Of one that is gone nobody has to say why by himself.
  if (other_failed_.found && (abort_.skips_grace() || other_failed_.found->kind == "gone" ||
                              Clock::now() - other_failed_.found->at > kGracePeriod))
    abort_rank(other_failed_.found->kind, other_failed_.found->text + "\nThis is " +
                                               mine.describe(seconds_since_epoch()) +
                                               ". It cannot go on alone, and ends, too.");
  return other_failed_.found.has_value();
}

bool Watchdog::check_processes(const RankStatus& mine) {
  if (mine.phase == Phase::OUTSIDE && !mine.is_waiting())
    return false;
  for (int64_t other = 0; other < size_; ++other) {
    if (other == rank_)
      continue;
    const auto& process = store_->process_of(other);
    if (!process || process->is_alive())
      continue;
    const auto all = store_->statuses(activity_.status());
    const auto& last = all[static_cast<size_t>(other)];
    // One that has left is missed only by who waits for it.
    const auto missing = find_awaited_ranks(all[static_cast<size_t>(rank_)], all);
    if (last.left && std::find(missing.begin(), missing.end(), other) == missing.end())
      continue;
    // It may have said why a moment ago.
    if (store_->has_failed(mine.stage, other))
      return false;
    const auto now = seconds_since_epoch();
    abort_all("gone",
        "The process of rank " + std::to_string(other) + " (number " + std::to_string(process->pid) +
            (last.left ? ") has ended its part and is gone, but this rank waits for it."
                       : ") is gone without a word. It was killed (SIGKILL, out of host memory), it "
                         "crashed, or it called exit().") +
            " Last seen: " + last.describe(now) + ".",
        "\nThis is " + mine.describe(now) + ". It cannot go on alone, and ends, too.");
    return true;
  }
  return false;
}

bool Watchdog::check_heartbeats(const RankStatus& mine) {
  if (!heartbeats_)
    return false;
  const auto seconds = heartbeats_->seconds_since_heartbeat(*store_);
  const auto other = heartbeats_->watched();
  const bool broken = abort_.skips_grace();
  if (seconds < (broken ? kGoneWhereBroken : kSilent) || (mine.phase == Phase::OUTSIDE && !mine.is_waiting())) {
    heartbeats_->reported = false;
    return false;
  }
  const bool gone = broken || seconds > kGone;
  if (heartbeats_->reported && !gone)
    return false;
  const auto all = store_->statuses(mine);
  const auto& last = all[static_cast<size_t>(other)];
  if (last.left || store_->has_failed(mine.stage, other)) {
    heartbeats_->reset();
    return false;
  }
  const auto now = seconds_since_epoch();
  auto text =
      "There has been no sign of life of " + format_ranks({other}, all) + " for " +
      std::to_string(static_cast<int64_t>(seconds)) +
      " s: its process was killed or stopped, or its host, or the network to it, is gone. Last seen: " +
      last.describe(now) + ".";
  if (!gone) {
    heartbeats_->reported = true;
    print(text + " It is given up after " + std::to_string(static_cast<int64_t>(kGone)) + " s.");
    return false;
  }
  abort_all("gone", text, "\nThis is " + mine.describe(now) + ". It cannot go on alone, and ends, too.");
  return true;
}

// NCCL's own watchdog is kept from ending the process (TORCH_NCCL_RETHROW_CUDA_ERRORS), also for what it
// alone knows: collectives of the module's own that take too long, and broken links.
bool Watchdog::check_backends(const RankStatus& mine) {
  std::unique_lock lock(mutex_);
  const auto backends = backends_;  // others may be added meanwhile
  lock.unlock();
  for (const auto& [name, backend] : backends) {
    const auto error = backend->getError();
    if (error == c10d::ErrorType::SUCCESS)
      continue;
    const auto now = seconds_since_epoch();
    const bool late = error == c10d::ErrorType::TIMEOUT;  // all ranks live, and can be asked
    const auto mine_and_others = late ? format_report(store_->statuses(mine), rank_, now) : mine.describe(now) + ".";
    abort_rank("failed",
                std::string("NCCL reports ") +
                    (late ? "that a collective took longer than its timeout" : "an error of communication") +
                    " in process group " + name + ". This is " + mine_and_others);
    return true;
  }
  return false;
}

void Watchdog::abort_all(const std::string& kind, const std::string& text, const std::string& rest) {
  abort_rank(kind, text + rest);
  store_->publish_failure(activity_.stage(), kind, text);
}

void Watchdog::abort_rank(const std::string& kind, const std::string& text) {
  abort_.abort(kind, text, Clock::now() + kExitTimeLimit);
  print(text);
}

void Watchdog::print(const std::string& text) const {
  // One call, so that lines of several processes do not mix; not through Python, whose lock may be held.
  std::string line = "[lightning_zero, rank " + std::to_string(rank_) + "] " + text + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lightning_zero
