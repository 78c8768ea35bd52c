#include "watchdog/watchdog.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "torch_compat.h"
#include "watchdog/rank_state.h"
#include "watchdog/rank_state_store.h"

namespace lightning_zero {

namespace {

using std::chrono::milliseconds;
using Clock = Watchdog::Clock;

constexpr milliseconds kSlice{250};         // interval between checks for an abort during a wait
constexpr milliseconds kHearTimeout{6000};  // time to find out who broke a connection
constexpr milliseconds kExitTimeout{6000};

const std::vector<int64_t>& checked(const std::vector<int64_t>& hosts, int64_t size) {
  TORCH_CHECK_VALUE(hosts.empty() || static_cast<int64_t>(hosts.size()) == size,
                    "lightning_zero: ", hosts.size(), " hosts were named for ", size, " ranks.");
  return hosts;
}

}  // namespace

Watchdog::Watchdog(const std::string& group_name, double report_s, double timeout_s,
                   std::vector<int64_t> hosts)
    : rank_(compat::process_group(group_name)->getRank()),
      size_(compat::process_group(group_name)->getSize()),
      activity_(rank_, checked(hosts, size_)),
      abort_(activity_),
      stall_policy_(rank_, size_, report_s, timeout_s),
      report_s_(report_s),
      process_(::getpid()) {
  if (size_ == 1)
    return;
  // A separate client, because a wait in the group's client holds its lock.
  auto store = compat::process_group(group_name)->getStore()->clone();
  store->setTimeout(milliseconds(5000));
  if (!hosts.empty())
    heartbeats_ = std::make_unique<Heartbeats>(rank_, hosts);
  store_ = std::make_unique<RankStateStore>(std::move(store), rank_, size_, std::move(hosts));
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  close();
}

// ---- activity of this rank

Watchdog::Waiting::Waiting(Watchdog& watchdog, SequenceId sequence, int64_t number, std::string what)
    : activity_(watchdog.activity_),
      id_(activity_.begin_wait(static_cast<int>(sequence), number, std::move(what))) {}

void Watchdog::wait(c10d::Work& work, SequenceId sequence, int64_t number, const char* what) {
  if (size_ == 1) {
    work.wait();
    return;
  }
  check();
  const Waiting waiting(*this, sequence, number, what);
  for (bool completed = false;;) {
    try {
      work.wait(kSlice);
      return;
    } catch (const std::exception&) {
      check();
      // Either only the slice timed out, or the work completed at the same time, and then the next wait
      // returns.
      if (!std::exchange(completed, work.isCompleted()))
        continue;
      // A connection broke. Find out which rank broke it.
      skip_grace_period();
      for (const auto begun = Clock::now(); Clock::now() - begun < kHearTimeout;) {
        check();
        std::this_thread::sleep_for(milliseconds(50));
      }
      throw;
    }
  }
}

int64_t Watchdog::begin_wait(int64_t sequence, std::string what) {
  TORCH_CHECK_VALUE(sequence < SEQUENCE_COUNT, "lightning_zero: there is no sequence ", sequence,
                    " of collectives.");
  check();
  const auto number = sequence < 0 ? 0 : activity_.advance(static_cast<SequenceId>(sequence));
  return activity_.begin_wait(static_cast<int>(sequence), number, std::move(what));
}

void Watchdog::watch_group(const std::string& group_name) {
  const auto group = compat::process_group(group_name);
  if (!group->hasBackends())
    return;
  for (const auto& device : group->getDeviceTypes()) {
    auto backend = group->getBackend(device.type());
    if (backend->getBackendName() != "nccl")
      continue;
    std::lock_guard lock(mutex_);
    backends_.emplace_back(group_name, std::move(backend));
  }
}

void Watchdog::set_report_interval(double report_s) {
  std::lock_guard lock(mutex_);
  report_s_ = report_s;
}

// ---- end of this rank

void Watchdog::fail(const std::string& text) {
  if (size_ > 1 && abort_.fail())
    store_->publish_failure(activity_.stage(), "failed", text);
}

void Watchdog::limit_exit_time() {
  if (!abort_.has_ended())
    return close();
  std::thread([] {
    std::this_thread::sleep_for(kExitTimeout);
    kill_forked_children();
    std::_Exit(1);
  }).detach();
}

void Watchdog::close() {
  if (::getpid() != process_) {
    if (thread_.joinable())
      thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true) || !thread_.joinable())
      return;
  }
  wake_.notify_all();
  thread_.join();
}

// ---- the thread, which polls twice a second

namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using Clock = Watchdog::Clock;

constexpr milliseconds kTick{500};
constexpr milliseconds kGracePeriod{3000};    // for a rank to fail by itself after another has failed
constexpr milliseconds kExitTimeLimit{4000};  // and then to end
constexpr milliseconds kStoreGone{5000};
constexpr milliseconds kDeviceLeft{10000};  // for the device of a failed rank
// Seconds without a heartbeat of a rank on another host: before a report; before an abort; and before an
// abort if a connection is known to be broken.
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
          break;  // the others have ended, and this rank does not need them
        abort_rank(
            "failed",
            "The key-value store through which ranks find each other is gone: the process that serves it, "
            "rank 0's or the launcher, has ended. Look for its error first.");
      }
    }
    if (abort_.is_ending() && abort_.is_overdue()) {
      print("This process did not end by itself within " + std::to_string(kExitTimeLimit.count() / 1000) +
            " s and is killed now.");
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
    // No rank is left to receive it.
  }
}

// Failed ranks release their devices from barriers, but not from collectives. Waiting for the device during
// exit would then hang.
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
    print(
        "This process has failed, and its device waits for other ranks that do not arrive. It is "
        "killed now. This is " +
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
  // A rank that is gone cannot report a reason itself.
  if (other_failed_.found && (abort_.skips_grace() || other_failed_.found->kind == "gone" ||
                              Clock::now() - other_failed_.found->at > kGracePeriod))
    abort_rank(other_failed_.found->kind, other_failed_.found->text + "\nThis is " +
                                              mine.describe(seconds_since_epoch()) +
                                              ". It cannot continue alone and ends too.");
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
    // A rank that has left is missing only if this rank waits for it.
    const auto missing = find_awaited_ranks(all[static_cast<size_t>(rank_)], all);
    if (last.left && std::find(missing.begin(), missing.end(), other) == missing.end())
      continue;
    // It may have reported a reason a moment ago.
    if (store_->has_failed(mine.stage, other))
      return false;
    const auto now = seconds_since_epoch();
    abort_all(
        "gone",
        "The process of rank " + std::to_string(other) + " (number " + std::to_string(process->pid) +
            (last.left
                 ? ") has finished and is gone, but this rank waits for it."
                 : ") is gone without reporting an error. It was killed (SIGKILL, out of host memory), it "
                   "crashed, or it called exit().") +
            " Last seen: " + last.describe(now) + ".",
        "\nThis is " + mine.describe(now) + ". It cannot continue alone and ends too.");
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
  if (seconds < (broken ? kGoneWhereBroken : kSilent) ||
      (mine.phase == Phase::OUTSIDE && !mine.is_waiting())) {
    heartbeats_->reported = false;
    return false;
  }
  const bool is_gone = broken || seconds > kGone;
  if (heartbeats_->reported && !is_gone)
    return false;
  const auto all = store_->statuses(mine);
  const auto& last = all[static_cast<size_t>(other)];
  if (last.left || store_->has_failed(mine.stage, other)) {
    heartbeats_->reset();
    return false;
  }
  const auto now = seconds_since_epoch();
  auto text = "There has been no heartbeat from " + format_ranks({other}, all) + " for " +
              std::to_string(static_cast<int64_t>(seconds)) +
              " s: its process was killed or stopped, or its host or the network to it failed. Last seen: " +
              last.describe(now) + ".";
  if (!is_gone) {
    heartbeats_->reported = true;
    print(text + " This rank gives up after " + std::to_string(static_cast<int64_t>(kGone)) + " s.");
    return false;
  }
  abort_all("gone", text, "\nThis is " + mine.describe(now) + ". It cannot continue alone and ends too.");
  return true;
}

// TORCH_NCCL_RETHROW_CUDA_ERRORS keeps NCCL's watchdog from ending the process, also for errors that only it
// observes: timeouts of the module's own collectives, and broken links.
bool Watchdog::check_backends(const RankStatus& mine) {
  std::unique_lock lock(mutex_);
  const auto backends = backends_;  // other groups may be added meanwhile
  lock.unlock();
  for (const auto& [name, backend] : backends) {
    const auto error = backend->getError();
    if (error == c10d::ErrorType::SUCCESS)
      continue;
    const auto now = seconds_since_epoch();
    const bool late = error == c10d::ErrorType::TIMEOUT;  // all ranks are alive and can be read
    const auto mine_and_others =
        late ? format_report(store_->statuses(mine), rank_, now) : mine.describe(now) + ".";
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
  // One write, so that lines of several processes do not mix. Not through Python, since another thread may
  // hold the GIL.
  std::string line = "[lightning_zero, rank " + std::to_string(rank_) + "] " + text + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lightning_zero
