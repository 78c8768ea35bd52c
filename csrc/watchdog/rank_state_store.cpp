#include "watchdog/rank_state_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstdlib>

#include "watchdog/rank_state.h"

namespace lightning_zero {

namespace {

constexpr size_t kParent = 1, kStarted = 19;  // indices in the fields after a process's name

// Not by streams: with a statically linked C++ library they would use another copy's locales and crash.
std::string read(const std::string& path) {
  std::string text;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return text;
  char part[1024];
  for (ssize_t length; (length = ::read(file, part, sizeof(part))) > 0;)
    text.append(part, static_cast<size_t>(length));
  ::close(file);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string link(const std::string& path) {
  char target[256];
  const auto length = ::readlink(path.c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : std::string();
}

std::string of_process(int64_t pid, const char* what) {
  return read("/proc/" + std::to_string(pid) + "/" + what);
}

// Return the process's fields from its state on, as text; empty if there is none.
std::vector<std::string> state_of(int64_t pid) {
  const auto text = of_process(pid, "stat");
  const auto end_of_name = text.rfind(')');  // the name may contain anything
  if (end_of_name == std::string::npos)
    return {};
  auto fields = split(text.substr(std::min(end_of_name + 2, text.size())), ' ');
  return fields.size() > kStarted && !fields[0].empty() ? fields : std::vector<std::string>();
}

// Return true if /proc belongs to the PID namespace of this process.
bool sees_itself() {
  return link("/proc/self") == std::to_string(::getpid());
}

}  // namespace

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(by, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string ProcessOnHost::own() {
  const auto pid = ::getpid();
  const auto state = state_of(pid);
  if (!sees_itself() || state.empty())
    return "";
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);  // hosts started from one image may share the boot id
  return std::string(host) + "/" + read("/proc/sys/kernel/random/boot_id") + "|" + link("/proc/self/ns/pid") +
         "|" + std::to_string(pid) + "|" + state[kStarted];
}

std::optional<ProcessOnHost> ProcessOnHost::find(const std::string& what) {
  const auto theirs = split(what, '|'), ours = split(own(), '|');
  // Compare the machine and the PID namespace.
  if (theirs.size() != 4 || ours.size() != 4 || theirs[1].empty() || theirs[0] != ours[0] ||
      theirs[1] != ours[1])
    return std::nullopt;
  return ProcessOnHost{std::strtoll(theirs[2].c_str(), nullptr, 10), theirs[3]};
}

std::string ProcessOnHost::host_in(const std::string& what) {
  return what.substr(0, what.find('/'));
}

bool ProcessOnHost::is_alive() const {
  const auto state = state_of(pid);
  return !state.empty() && state[0] != "Z" && state[0] != "X" && state[kStarted] == started;
}

void kill_forked_children() {
  auto* processes = sees_itself() ? ::opendir("/proc") : nullptr;
  if (processes == nullptr)
    return;
  const auto own = std::to_string(::getpid());
  const auto command = of_process(::getpid(), "cmdline"), environment = of_process(::getpid(), "environ");
  while (const auto* entry = ::readdir(processes)) {
    const auto pid = std::strtoll(entry->d_name, nullptr, 10);
    if (pid <= 1)
      continue;
    const auto state = state_of(pid);
    if (state.empty() || state[kParent] != own)
      continue;
    const auto theirs = of_process(pid, "cmdline");
    if (theirs.find("--multiprocessing-fork") != std::string::npos ||
        (theirs == command && of_process(pid, "environ") == environment))
      ::kill(static_cast<pid_t>(pid), SIGKILL);
  }
  ::closedir(processes);
}

namespace {

std::string key(const std::string& what, int64_t rank) {
  return "lightning_zero/watchdog/" + what + "/" + std::to_string(rank);
}

std::string failed_key(int64_t stage, int64_t rank) {
  return key("failed/" + std::to_string(stage), rank);
}

}  // namespace

RankStateStore::RankStateStore(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size,
                               std::vector<int64_t> hosts)
    : store_(std::move(store)), rank_(rank), size_(size), hosts_(std::move(hosts)) {
  processes_.resize(static_cast<size_t>(size));
  known_.resize(static_cast<size_t>(size));
  asked_.resize(static_cast<size_t>(size));
  beating_.resize(static_cast<size_t>(size));
  process_texts_.resize(static_cast<size_t>(size));
}

bool RankStateStore::has(const std::string& key) {
  return store_->check({key});
}

std::string RankStateStore::get(const std::string& key) {
  const auto bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

void RankStateStore::publish(const RankStatus& mine) {
  if (published_.empty())
    store_->set(key("process", rank_), ProcessOnHost::own());
  auto text = mine.to_text();
  if (text == published_)
    return;
  store_->set(key("status", rank_), text);
  published_ = std::move(text);
}

std::vector<RankStatus> RankStateStore::statuses(const RankStatus& mine) {
  std::vector<RankStatus> all;
  for (int64_t other = 0; other < size_; ++other) {
    if (other == rank_) {
      all.push_back(mine);
      continue;
    }
    if (!known_[other])
      known_[other] = has(key("status", other));
    all.push_back(RankStatus::from_text(other, known_[other] ? get(key("status", other)) : ""));
  }
  for (auto& status : all) {
    status.set_host(hosts_);
    if (status.location.host >= 0)
      status.location.host_name = ProcessOnHost::host_in(process_text(status.rank).value_or(""));
  }
  return all;
}

const std::optional<std::string>& RankStateStore::process_text(int64_t other) {
  auto& text = process_texts_[other];
  if (!text && has(key("process", other)))
    text = get(key("process", other));
  return text;
}

const std::optional<ProcessOnHost>& RankStateStore::process_of(int64_t other) {
  // Ranks that are configured as different hosts count as unable to see each other.
  if (asked_[other] || (!hosts_.empty() && hosts_[other] != hosts_[rank_]))
    return processes_[other];
  if (const auto& text = process_text(other)) {
    asked_[other] = true;
    processes_[other] = ProcessOnHost::find(*text);
  }
  return processes_[other];
}

void RankStateStore::publish_heartbeat() {
  // Distinct from the heartbeats of an earlier watchdog of this process.
  store_->set(key("beat", rank_), std::to_string(seconds_since_epoch()) + " " + std::to_string(++beats_));
}

std::string RankStateStore::heartbeat_of(int64_t other) {
  if (!beating_[other])
    beating_[other] = has(key("beat", other));
  return beating_[other] ? get(key("beat", other)) : "";
}

void RankStateStore::publish_failure(int64_t stage, const std::string& kind, const std::string& text) {
  try {
    store_->set(failed_key(stage, rank_), kind + "|" + text);
    store_->add("lightning_zero/watchdog/failures/" + std::to_string(stage), 1);
  } catch (const std::exception&) {
    // The store is gone, and with it all receivers.
  }
}

bool RankStateStore::any_failed(int64_t stage) {
  return store_->add("lightning_zero/watchdog/failures/" + std::to_string(stage), 0) != 0;
}

bool RankStateStore::has_failed(int64_t stage, int64_t other) {
  return has(failed_key(stage, other));
}

RankStateStore::Failure RankStateStore::failure_of(int64_t stage, int64_t other) {
  const auto message = get(failed_key(stage, other));
  const auto bar = message.find('|');
  return {message.substr(0, bar), message.substr(bar + 1)};
}

namespace {

constexpr std::chrono::duration<double> kBeat{1.0};
// seconds; a longer gap means that this thread was stopped or delayed
constexpr double kMaxBetweenChecks = 1.5;

// Return the rank with the same local rank on the next host, cyclically.
int64_t next_of(int64_t rank, const std::vector<int64_t>& hosts) {
  const auto stands = [&](int64_t of) {
    RankStatus status;
    status.rank = of;
    status.set_host(hosts);
    return status;
  };
  const auto mine = stands(rank);
  const auto count = *std::max_element(hosts.begin(), hosts.end()) + 1;
  for (int64_t other = 0; other < static_cast<int64_t>(hosts.size()); ++other) {
    const auto status = stands(other);
    if (status.location.host == (mine.location.host + 1) % count &&
        status.location.local_rank == mine.location.local_rank)
      return other;
  }
  return rank;
}

}  // namespace

Heartbeats::Heartbeats(int64_t rank, const std::vector<int64_t>& hosts) : watched_(next_of(rank, hosts)) {}

double Heartbeats::seconds_since_heartbeat(RankStateStore& store) {
  const auto now = Clock::now();
  const auto passed =
      checked_ == Clock::time_point{} ? 0.0 : std::chrono::duration<double>(now - checked_).count();
  checked_ = now;
  silent_ += std::min(passed, kMaxBetweenChecks);
  if (now - published_at_ < kBeat)
    return silent_;
  published_at_ = now;
  store.publish_heartbeat();
  auto beat = store.heartbeat_of(watched_);
  if (beat.empty() || beat != last_) {
    last_ = std::move(beat);
    silent_ = 0;
  }
  return silent_;
}

}  // namespace lightning_zero
