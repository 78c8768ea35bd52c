#include "runtime/watchdog.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "runtime/compat.h"

namespace lightning_zero {

namespace {

using std::chrono::milliseconds;
using Clock = Watchdog::Clock;

constexpr milliseconds kSlice{250};    // of a wait, between two looks at whether it should end
constexpr milliseconds kToHear{6000};  // by when it is known who broke a connection
constexpr milliseconds kToLeave{6000};

}  // namespace

Watchdog::Watchdog(const std::string& group_name, double report_s, double timeout_s)
    : report_(report_s), timeout_(timeout_s) {
  const auto group = compat::process_group(group_name);
  rank_ = group->getRank();
  size_ = group->getSize();
  mine_.rank = rank_;
  mine_.known = true;
  mine_.phase_since = seconds_since_epoch();
  if (size_ == 1)
    return;
  store_ = group->getStore()->clone();  // whoever waits in the other one holds its lock
  store_->setTimeout(milliseconds(5000));
  processes_.resize(static_cast<size_t>(size_));
  known_.resize(static_cast<size_t>(size_));
  asked_.resize(static_cast<size_t>(size_));
  thread_ = std::thread([this] { run(); });
}

std::string Watchdog::key(const std::string& what, int64_t rank) {
  return "lightning_zero/watchdog/" + what + "/" + std::to_string(rank);
}

// ---- what this rank does

void Watchdog::enter(int64_t phase) {
  std::lock_guard lock(mutex_);
  const auto next = static_cast<Phase>(phase);
  if (next == Phase::FORWARD)
    ++mine_.batches;
  mine_.phase = next;
  mine_.phase_since = seconds_since_epoch();
  ++activity_;
}

void Watchdog::busy(std::string what) {
  std::lock_guard lock(mutex_);
  mine_.busy = std::move(what);
  mine_.busy_since = seconds_since_epoch();
  ++activity_;
}

int64_t Watchdog::meet(Lane lane) {
  activity_.fetch_add(1, std::memory_order_relaxed);
  return met_[static_cast<size_t>(lane)].fetch_add(1, std::memory_order_relaxed) + 1;
}

void Watchdog::reach(Lane lane, int64_t number) {
  activity_.fetch_add(1, std::memory_order_relaxed);
  met_[static_cast<size_t>(lane)].store(number, std::memory_order_relaxed);
}

Watchdog::Waiting::Waiting(Watchdog& watchdog, Lane lane, int64_t number, const char* what)
    : watchdog_(watchdog), id_(watchdog.note_wait(static_cast<int>(lane), number, what)) {}

void Watchdog::wait(c10d::Work& work, Lane lane, int64_t number, const char* what) {
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
      hurry();
      for (const auto begun = Clock::now(); Clock::now() - begun < kToHear;) {
        check();
        std::this_thread::sleep_for(milliseconds(50));
      }
      throw;
    }
  }
}

int64_t Watchdog::begin_wait(int64_t lane, std::string what) {
  check();
  return note_wait(static_cast<int>(lane), lane < 0 ? 0 : meet(static_cast<Lane>(lane)), std::move(what));
}

int64_t Watchdog::note_wait(int lane, int64_t number, std::string what) {
  std::lock_guard lock(mutex_);
  waits_.push_back({lane, number, std::move(what), Clock::now(), ++ids_});
  return ids_;
}

void Watchdog::end_wait(int64_t id) {
  std::lock_guard lock(mutex_);
  waits_.remove_if([&](const Wait& wait) { return wait.id == id; });
  ++activity_;
}

void Watchdog::forget_names() {
  std::lock_guard lock(mutex_);  // the thread reads them under it
  last_ = nullptr;
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

void Watchdog::watch_device(const at::Tensor& words) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(words.device().is_cpu() && words.scalar_type() == at::kInt &&
                        words.numel() >= 1 + 2 * DEVICE_LANES);
  device_words_ = words;
}

void Watchdog::let_devices_pass(bool all) {
  if (device_words_.defined())
    device_words_.mutable_data_ptr<int>()[0] = all;
}

// ---- how it ends

void Watchdog::begin() {
  std::lock_guard lock(mutex_);
  ++mine_.stage;
  failed_ = false;
  hurried_ = false;
  if (!ending_)
    let_devices_pass(false);
  ++activity_;
}

void Watchdog::fail(const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (size_ == 1 || failed_)
      return;
    failed_ = true;
    let_devices_pass(true);
    if (ending_)
      return;  // it ends because of another; that one has told everybody
  }
  tell("failed", text);
}

void Watchdog::tell(const std::string& kind, const std::string& text) {
  int64_t stage = 0;
  {
    std::lock_guard lock(mutex_);
    stage = mine_.stage;
  }
  try {
    store_->set(key("failed/" + std::to_string(stage), rank_), kind + "|" + text);
    store_->add("lightning_zero/watchdog/failures/" + std::to_string(stage), 1);
  } catch (const std::exception&) {
    // The store is gone, and with it whoever could be told.
  }
}

void Watchdog::hurry() {
  hurried_.store(true, std::memory_order_relaxed);
}

void Watchdog::check() {
  if (ending_.load(std::memory_order_acquire))
    raise();
}

std::string Watchdog::verdict() const {
  std::lock_guard lock(mutex_);
  return text_;
}

void Watchdog::raise() {
  std::string kind, text;
  {
    std::lock_guard lock(mutex_);
    kind = kind_;
    text = text_;
    told_ = true;
  }
  if (!end_op_.empty())
    compat::call(end_op_, {kind, text});
  TORCH_CHECK(false, text);
}

void Watchdog::leave() {
  bool broken = false;
  {
    std::lock_guard lock(mutex_);
    broken = ending_ || failed_;
  }
  if (!broken)
    return close();
  std::thread([] {
    std::this_thread::sleep_for(kToLeave);
    end_forked_children();
    std::_Exit(1);
  }).detach();
}

void Watchdog::close() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true) || !thread_.joinable())
      return;
  }
  wake_.notify_all();
  thread_.join();
}

}  // namespace lightning_zero
