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
constexpr milliseconds kToFail{3000};  // that a rank gets to fail by itself once another has
constexpr milliseconds kToEnd{4000};   // and then to end
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
      look();
      since_.store_lost = {};
    } catch (const std::exception&) {
      if (since_.store_lost == Clock::time_point{})
        since_.store_lost = Clock::now();
      if (Clock::now() - since_.store_lost > kStoreGone && !end_.is_ending()) {
        if (const auto mine = activity_.status(); mine.phase == Phase::OUTSIDE && !mine.waits())
          break;  // the others have ended, and this rank needs them no more
        end_as_told(
            "failed",
            "The key-value store through which ranks find each other is gone: the process that serves it, "
            "rank 0's or the launcher, has ended. Look for its error first.");
      }
    }
    if (end_.is_ending() && end_.is_overdue()) {
      say("This process did not end by itself within " + std::to_string(kToEnd.count() / 1000) +
          " s and is ended now.");
      end_forked_children();
      std::_Exit(1);
    }
    end_where_the_device_is_left();
  }
  try {
    RankStatus last = activity_.status();
    last.left = true;
    board_->publish(last);
  } catch (const std::exception&) {
    // Nobody is left to be told.
  }
}

// A barrier lets devices pass once a rank has failed, collectives do not: whatever then waits for the device,
// on the way out, would wait for ever.
void Watchdog::end_where_the_device_is_left() {
  const auto mine = activity_.status();
  const bool left = end_.has_failed() && mine.wait.on_device &&
                    mine.wait.lane < static_cast<int>(SequenceId::DEVICE_REDUCE) &&
                    seconds_since_epoch() - mine.wait.since > duration<double>(kDeviceLeft).count();
  if (!left)
    since_.device_left = {};
  else if (since_.device_left == Clock::time_point{})
    since_.device_left = Clock::now();
  else if (Clock::now() - since_.device_left > kToEnd) {
    say("This process has failed, and its device waits for other ranks, which do not come. It is ended now. "
        "This is " +
        mine.describe(seconds_since_epoch()) + ".");
    end_forked_children();
    std::_Exit(1);
  }
}

void Watchdog::look() {
  const auto mine = activity_.status();
  board_->publish(mine);
  if (end_.is_ending() || look_for_failures(mine) || look_for_deaths(mine) || look_for_silence(mine) ||
      look_at_backends(mine))
    return;
  {
    std::lock_guard lock(mutex_);
    judge_.set_report_interval(report_s_);
  }
  const auto found = judge_.look(mine, [this] { return board_->statuses(activity_.status()); });
  if (!found.report.empty())
    say(found.report);
  if (!found.kind.empty())
    end(found.kind, found.text);
}

bool Watchdog::look_for_failures(const RankStatus& mine) {
  if (end_.has_failed())
    return true;
  if (std::exchange(other_failed_.stage, mine.stage) != mine.stage)
    other_failed_.found.reset();
  if (!board_->any_failed(mine.stage))
    return false;
  for (int64_t other = 0; other < size_ && !other_failed_.found; ++other) {
    if (other == rank_ || !board_->has_failed(mine.stage, other))
      continue;
    const auto failure = board_->failure_of(mine.stage, other);
    other_failed_.found = {
        Clock::now(), failure.kind,
        "Rank " + std::to_string(other) + (failure.kind == "gone" ? " says: " : " failed: ") + failure.text};
  }
  // Of one that is gone nobody has to say why by himself.
  if (other_failed_.found && (end_.is_hurried() || other_failed_.found->kind == "gone" ||
                              Clock::now() - other_failed_.found->at > kToFail))
    end_as_told(other_failed_.found->kind, other_failed_.found->text + "\nThis is " +
                                               mine.describe(seconds_since_epoch()) +
                                               ". It cannot go on alone, and ends, too.");
  return other_failed_.found.has_value();
}

bool Watchdog::look_for_deaths(const RankStatus& mine) {
  if (mine.phase == Phase::OUTSIDE && !mine.waits())
    return false;
  for (int64_t other = 0; other < size_; ++other) {
    if (other == rank_)
      continue;
    const auto& process = board_->process_of(other);
    if (!process || process->is_alive())
      continue;
    const auto all = board_->statuses(activity_.status());
    const auto& last = all[static_cast<size_t>(other)];
    // One that has left is missed only by who waits for it.
    const auto missing = held_up_by(all[static_cast<size_t>(rank_)], all);
    if (last.left && std::find(missing.begin(), missing.end(), other) == missing.end())
      continue;
    // It may have said why a moment ago.
    if (board_->has_failed(mine.stage, other))
      return false;
    const auto now = seconds_since_epoch();
    end("gone",
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

bool Watchdog::look_for_silence(const RankStatus& mine) {
  if (!hearts_)
    return false;
  const auto seconds = hearts_->silence(*board_);
  const auto other = hearts_->watched();
  const bool broken = end_.is_hurried();
  if (seconds < (broken ? kGoneWhereBroken : kSilent) || (mine.phase == Phase::OUTSIDE && !mine.waits())) {
    hearts_->said = false;
    return false;
  }
  const bool gone = broken || seconds > kGone;
  if (hearts_->said && !gone)
    return false;
  const auto all = board_->statuses(mine);
  const auto& last = all[static_cast<size_t>(other)];
  if (last.left || board_->has_failed(mine.stage, other)) {
    hearts_->excuse();
    return false;
  }
  const auto now = seconds_since_epoch();
  auto text =
      "There has been no sign of life of " + named({other}, all) + " for " +
      std::to_string(static_cast<int64_t>(seconds)) +
      " s: its process was killed or stopped, or its host, or the network to it, is gone. Last seen: " +
      last.describe(now) + ".";
  if (!gone) {
    hearts_->said = true;
    say(text + " It is given up after " + std::to_string(static_cast<int64_t>(kGone)) + " s.");
    return false;
  }
  end("gone", text, "\nThis is " + mine.describe(now) + ". It cannot go on alone, and ends, too.");
  return true;
}

// NCCL's own watchdog is kept from ending the process (TORCH_NCCL_RETHROW_CUDA_ERRORS), also for what it
// alone knows: collectives of the module's own that take too long, and broken links.
bool Watchdog::look_at_backends(const RankStatus& mine) {
  std::unique_lock lock(mutex_);
  const auto backends = backends_;  // others may be added meanwhile
  lock.unlock();
  for (const auto& [name, backend] : backends) {
    const auto error = backend->getError();
    if (error == c10d::ErrorType::SUCCESS)
      continue;
    const auto now = seconds_since_epoch();
    const bool late = error == c10d::ErrorType::TIMEOUT;  // all ranks live, and can be asked
    const auto mine_and_others = late ? report(board_->statuses(mine), rank_, now) : mine.describe(now) + ".";
    end_as_told("failed",
                std::string("NCCL reports ") +
                    (late ? "that a collective took longer than its timeout" : "an error of communication") +
                    " in process group " + name + ". This is " + mine_and_others);
    return true;
  }
  return false;
}

void Watchdog::end(const std::string& kind, const std::string& text, const std::string& rest) {
  end_as_told(kind, text + rest);
  board_->tell_failure(activity_.stage(), kind, text);
}

void Watchdog::end_as_told(const std::string& kind, const std::string& text) {
  end_.decide(kind, text, Clock::now() + kToEnd);
  say(text);
}

void Watchdog::say(const std::string& text) const {
  // One call, so that lines of several processes do not mix; not through Python, whose lock may be held.
  std::string line = "[lightning_zero, rank " + std::to_string(rank_) + "] " + text + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lightning_zero
