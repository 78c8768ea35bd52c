#include "runtime/watchdog.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "runtime/compat.h"
#include "runtime/heartbeats.h"
#include "runtime/rank_board.h"

namespace lightning_zero {

namespace {

using std::chrono::milliseconds;
using Clock = Watchdog::Clock;

constexpr milliseconds kSlice{250};    // of a wait, between two looks at whether it should end
constexpr milliseconds kToHear{6000};  // by when it is known who broke a connection
constexpr milliseconds kToLeave{6000};

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
      end_(activity_),
      judge_(rank_, size_, report_s, timeout_s),
      report_s_(report_s),
      process_(::getpid()) {
  if (size_ == 1)
    return;
  // A client of its own: whoever waits in the group's holds its lock.
  auto store = compat::process_group(group_name)->getStore()->clone();
  store->setTimeout(milliseconds(5000));
  if (!hosts.empty())
    hearts_ = std::make_unique<Heartbeats>(rank_, hosts);
  board_ = std::make_unique<RankBoard>(std::move(store), rank_, size_, std::move(hosts));
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  close();
}

// ---- what this rank does

Watchdog::Waiting::Waiting(Watchdog& watchdog, SequenceId lane, int64_t number, std::string what)
    : activity_(watchdog.activity_),
      id_(activity_.begin_wait(static_cast<int>(lane), number, std::move(what))) {}

void Watchdog::wait(c10d::Work& work, SequenceId lane, int64_t number, const char* what) {
  if (size_ == 1) {
    work.wait();
    return;
  }
  check();
  const Waiting waiting(*this, lane, number, what);
  for (bool completed = false;;) {
    try {
      work.wait(kSlice);
      return;
    } catch (const std::exception&) {
      check();
      // Only the slice is over; or was, just before the work ended well: then the next wait returns.
      if (!std::exchange(completed, work.isCompleted()))
        continue;
      // A connection broke. Who broke it is better to know than that it is broken.
      skip_grace_period();
      for (const auto begun = Clock::now(); Clock::now() - begun < kToHear;) {
        check();
        std::this_thread::sleep_for(milliseconds(50));
      }
      throw;
    }
  }
}

int64_t Watchdog::begin_wait(int64_t lane, std::string what) {
  TORCH_CHECK_VALUE(lane < LANES, "lightning_zero: there is no lane ", lane, " of collectives.");
  check();
  const auto number = lane < 0 ? 0 : activity_.meet(static_cast<SequenceId>(lane));
  return activity_.begin_wait(static_cast<int>(lane), number, std::move(what));
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

// ---- how it ends

void Watchdog::fail(const std::string& text) {
  if (size_ > 1 && end_.fail())
    board_->tell_failure(activity_.stage(), "failed", text);
}

void Watchdog::leave() {
  if (!end_.is_broken())
    return close();
  std::thread([] {
    std::this_thread::sleep_for(kToLeave);
    end_forked_children();
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

}  // namespace lightning_zero
