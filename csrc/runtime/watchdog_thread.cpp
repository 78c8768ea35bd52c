// The Watchdog's thread: looks around twice a second. See watchdog.h.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "runtime/watchdog.h"

namespace lightning_zero {

namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using Clock = Watchdog::Clock;

constexpr milliseconds kTick{500};
constexpr milliseconds kToFail{3000};        // that a rank gets to fail by itself once another has
constexpr milliseconds kToEnd{4000};         // and then to end
constexpr milliseconds kStuck{4000};         // for which nothing moves before a deadlock is called one
constexpr milliseconds kStill{2000};         // for which no rank has moved, nor waits where that is seen
constexpr milliseconds kDeviceStuck{60000};  // the same where devices wait: their hosts may still come round
constexpr milliseconds kStoreGone{5000};
constexpr double kLookAfter = 2;     // seconds of a wait after which the others are looked at
constexpr double kReportAgain = 10;  // times the time until the first report

constexpr const char* kDeviceWaits[DEVICE_LANES] = {"a barrier before gradients are added up",
                                                    "its turn to read or to write parameters"};

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
      store_lost_ = {};
    } catch (const std::exception&) {
      if (store_lost_ == Clock::time_point{})
        store_lost_ = Clock::now();
      if (Clock::now() - store_lost_ > kStoreGone && !ending_) {
        if (const auto mine = own(); mine.phase == Phase::OUTSIDE && !mine.waits())
          break;  // the others have ended, and this rank needs them no more
        end("failed",
            "The key-value store through which ranks find each other is gone: the process that serves it, "
            "rank 0's or the launcher, has ended. Look for its error first.");
      }
    }
    if (ending_) {
      std::unique_lock lock(mutex_);
      // Under a Trainer, whoever is told comes to fail(); without one, nobody need.
      if (!failed_ && !(told_ && mine_.stage == 0) && Clock::now() > deadline_) {
        lock.unlock();
        say("This process did not end by itself within " + std::to_string(kToEnd.count() / 1000) +
            " s and is ended now.");
        end_forked_children();
        std::_Exit(1);
      }
    }
  }
  try {
    RankStatus last = own();
    last.left = true;
    publish(last);
  } catch (const std::exception&) {
    // Nobody is left to be told.
  }
}

void Watchdog::look() {
  const auto mine = own();
  publish(mine);
  if (ending_ || look_for_failures(mine) || look_for_deaths(mine) || look_at_backends(mine))
    return;
  look_at_waits(mine);
}

void Watchdog::add_device_wait(RankStatus& status) {
  if (!device_words_.defined())
    return;
  const volatile int* words = device_words_.const_data_ptr<int>();
  for (int lane = 0; lane < DEVICE_LANES; ++lane) {
    const int64_t arrived = words[1 + 2 * lane], passed = words[2 + 2 * lane];
    status.met[static_cast<size_t>(Lane::DEVICE_REDUCE) + lane] = arrived;
    auto& seen = on_device_[lane];
    if (arrived == passed || arrived != seen.arrived)
      seen = {arrived, seconds_since_epoch()};
    if (arrived != passed && !status.waits()) {
      status.on_device = true;
      status.wait_lane = static_cast<int>(Lane::DEVICE_REDUCE) + lane;
      status.wait_number = arrived;
      status.wait = kDeviceWaits[lane];
      status.wait_since = seen.since;
    }
  }
}

RankStatus Watchdog::own() {
  std::lock_guard lock(mutex_);
  auto status = mine_;
  status.activity = activity_;
  if (const auto* last = last_.load(std::memory_order_relaxed))
    status.last = *last;
  for (size_t lane = 0; lane < LANES; ++lane) status.met[lane] = met_[lane];
  if (!waits_.empty()) {
    const auto& wait = waits_.front();
    status.wait_lane = wait.lane;
    status.wait_number = wait.number;
    status.wait = wait.what;
    status.wait_since = seconds_since_epoch() - duration<double>(Clock::now() - wait.since).count();
    // Milliseconds of jitter between two readings of two clocks would be news each time.
    status.wait_since = std::round(status.wait_since * 10) / 10;
  }
  add_device_wait(status);
  return status;
}

void Watchdog::publish(const RankStatus& mine) {
  if (published_.empty())
    store_->set(key("process", rank_), ProcessOnHost::own());
  auto text = mine.to_text();
  if (text == published_)
    return;
  store_->set(key("status", rank_), text);
  published_ = std::move(text);
}

bool Watchdog::has(const std::string& key) {
  return store_->check({key});
}

std::string Watchdog::get(const std::string& key) {
  const auto bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

std::vector<RankStatus> Watchdog::statuses() {
  std::vector<RankStatus> all;
  for (int64_t other = 0; other < size_; ++other) {
    if (other == rank_) {
      all.push_back(own());
      continue;
    }
    if (!known_[other])
      known_[other] = has(key("status", other));
    all.push_back(RankStatus::from_text(other, known_[other] ? get(key("status", other)) : ""));
  }
  return all;
}

bool Watchdog::look_for_failures(const RankStatus& mine) {
  {
    std::lock_guard lock(mutex_);
    if (failed_)
      return true;
  }
  if (std::exchange(looked_stage_, mine.stage) != mine.stage)
    other_failed_.reset();
  const auto stage = std::to_string(mine.stage);
  if (store_->add("lightning_zero/watchdog/failures/" + stage, 0) == 0)
    return false;
  for (int64_t other = 0; other < size_ && !other_failed_; ++other) {
    const auto failed = key("failed/" + stage, other);
    if (other == rank_ || !has(failed))
      continue;
    const auto told = get(failed);
    const auto bar = told.find('|');
    other_failed_ = {Clock::now(), told.substr(0, bar),
                     "Rank " + std::to_string(other) + " failed: " + told.substr(bar + 1)};
  }
  if (other_failed_ && (hurried_ || Clock::now() - other_failed_->at > kToFail))
    end(other_failed_->kind, other_failed_->text + "\nThis is " + mine.describe(seconds_since_epoch()) +
                                 ". It cannot go on alone, and ends, too.");
  return other_failed_.has_value();
}

bool Watchdog::look_for_deaths(const RankStatus& mine) {
  if (mine.phase == Phase::OUTSIDE && !mine.waits())
    return false;
  for (int64_t other = 0; other < size_; ++other) {
    if (other == rank_)
      continue;
    if (!asked_[other]) {
      if (!has(key("process", other)))
        continue;
      asked_[other] = true;
      processes_[other] = ProcessOnHost::find(get(key("process", other)));
    }
    if (!processes_[other] || processes_[other]->is_alive())
      continue;
    const auto all = statuses();
    const auto& last = all[static_cast<size_t>(other)];
    // One that has left is missed only by who waits for it.
    const auto missing = held_up_by(mine, all);
    if (last.left && std::find(missing.begin(), missing.end(), other) == missing.end())
      continue;
    // It may have said why a moment ago.
    if (has(key("failed/" + std::to_string(mine.stage), other)))
      return false;
    const auto now = seconds_since_epoch();
    end("failed",
        "The process of rank " + std::to_string(other) + " (number " +
            std::to_string(processes_[other]->pid) +
            (last.left ? ") has ended its part and is gone, but this rank waits for it."
                       : ") is gone without a word. It was killed (SIGKILL, out of host memory), it "
                         "crashed, or it called exit().") +
            " Last seen: " + last.describe(now) + ".\nThis is " + mine.describe(now) +
            ". It cannot go on alone, and ends, too.");
    return true;
  }
  return false;
}

// NCCL's own watchdog is kept from ending the process (TORCH_NCCL_RETHROW_CUDA_ERRORS), also for what it
// alone knows: collectives of the module's own that take too long, and broken links.
bool Watchdog::look_at_backends(const RankStatus& mine) {
  for (const auto& [name, backend] : backends_) {
    const auto error = backend->getError();
    if (error == c10d::ErrorType::SUCCESS)
      continue;
    end("failed",
        "NCCL reports " +
            std::string(error == c10d::ErrorType::TIMEOUT ? "that a collective took longer than its timeout"
                                                          : "an error of communication") +
            " in process group " + name + ". This is " + mine.describe(seconds_since_epoch()) + ".");
    return true;
  }
  return false;
}

void Watchdog::look_at_waits(const RankStatus& mine) {
  const auto now = Clock::now();
  const auto wall = seconds_since_epoch();
  if (mine.activity != seen_activity_) {
    seen_activity_ = mine.activity;
    quiet_since_ = now;
    reported_after_ = report_.count();
    stuck_at_.clear();
  }
  const double quiet = duration<double>(now - quiet_since_).count();
  const double waited = mine.waits() ? wall - mine.wait_since : 0;
  const bool watched = mine.phase != Phase::OUTSIDE || mine.waits();
  if (!watched || !mine.busy.empty() || now < next_look_ || (waited < kLookAfter && quiet < report_.count()))
    return;
  next_look_ = now + milliseconds(1000 + 20 * size_);  // so that many ranks do not keep the store busy
  const auto all = statuses();
  const bool missed = std::any_of(all.begin(), all.end(), [&](const RankStatus& other) {
    return other.rank != rank_ && other.waits() && wall - other.wait_since > report_.count();
  });
  std::vector<int64_t> at;
  bool devices = false;
  for (const auto& status : all) {
    at.push_back(status.activity);
    devices = devices || status.on_device;
  }
  if (std::exchange(all_at_, at) != at)
    still_since_ = now;
  // A collective of the module's own, or of a callback's, is nothing that anybody here sees. Long
  // computations look the same, so this is said less and less often.
  const bool still = is_still(all) && quiet > still_after_ && now - still_since_ > kStill;
  if (still)
    still_after_ = kReportAgain * quiet;
  if (still || std::max(waited, missed ? quiet : 0) > reported_after_) {
    reported_after_ = kReportAgain * std::max(waited, quiet);
    say(std::string("No progress. ") +
        (still ? "Every rank computes, or waits in something that is not watched. " : "") + "This is " +
        report(all, rank_, wall));
  }
  if (waited > timeout_.count())
    return end("timeout", "A wait took longer than the timeout of " +
                              std::to_string(static_cast<int64_t>(timeout_.count())) + " s. This is " +
                              report(all, rank_, wall));
  if (!is_deadlock(all)) {
    stuck_at_.clear();
    return;
  }
  if (at != stuck_at_) {
    stuck_at_ = std::move(at);
    stuck_since_ = now;
  } else if (now - stuck_since_ > (devices ? kDeviceStuck : kStuck)) {
    end("mismatch",
        "Ranks wait for each other at different places, and would for ever. This is " +
            report(all, rank_, wall) +
            " Every rank must read the same modules in the same order where weights are all-gathered, and "
            "run as many forward and backward passes, and take norms and sums of parameters on every rank: "
            "look for branches that depend on the data or on the rank.");
  }
}

void Watchdog::end(const std::string& kind, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    kind_ = kind;
    text_ = text;
    deadline_ = Clock::now() + kToEnd;
    let_devices_pass(true);
  }
  ending_.store(true, std::memory_order_release);
  say(text);
  if (kind != "failed")
    tell(kind, text);
}

void Watchdog::say(const std::string& text) const {
  // One call, so that lines of several processes do not mix; not through Python, whose lock may be held.
  std::string line = "[lightning_zero, rank " + std::to_string(rank_) + "] " + text + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lightning_zero
