#include "watchdog/rank_state.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "watchdog/rank_state_store.h"

namespace lightning_zero {

namespace {

constexpr char kSeparator = '\n';
constexpr double kNoProgress = 5;  // seconds without progress after which a report mentions it

const char* name(Phase phase) {
  switch (phase) {
    case Phase::OUTSIDE:
      return "outside of the Trainer's loops";
    case Phase::SETUP:
      return "setting up";
    case Phase::BETWEEN:
      return "between two steps";
    case Phase::FORWARD:
      return "forward";
    case Phase::BACKWARD:
      return "backward";
    case Phase::STEP:
      return "the optimizer's step";
    case Phase::EVALUATION:
      return "evaluation";
    case Phase::USER_CODE:
      return "the user's code outside of forward, backward and optimizer steps";
  }
  return "?";
}

std::string clean(std::string text) {
  std::replace(text.begin(), text.end(), kSeparator, ' ');
  return text;
}

std::string seconds(double since, double now) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.0f s", std::max(0.0, now - since));
  return text;
}

}  // namespace

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void RankStatus::set_host(const std::vector<int64_t>& hosts) {
  if (hosts.empty())
    return;
  const auto own = hosts.begin() + rank;
  location.host = *own;
  location.local_rank = std::count(hosts.begin(), own, location.host);
}

std::string RankStatus::to_text() const {
  std::string out;
  const auto add = [&](const std::string& value) { (out += value) += kSeparator; };
  const auto integer = [&](int64_t value) { add(std::to_string(value)); };
  const auto time = [&](double value) { integer(std::llround(1000 * value)); };
  integer(left);
  integer(stage);
  integer(static_cast<int64_t>(phase));
  integer(batches);
  time(phase_since);
  add(clean(last));
  add(clean(busy));
  time(busy_since);
  add(clean(task.what));
  integer(task.updates);
  time(task.updated_at);
  integer(activity);
  integer(wait.sequence);
  integer(wait.number);
  add(clean(wait.what));
  time(wait.since);
  integer(wait.on_device);
  for (const auto count : sequence_numbers) integer(count);
  return out;
}

RankStatus RankStatus::from_text(int64_t rank, const std::string& text) {
  RankStatus status;
  status.rank = rank;
  const auto fields = split(text, kSeparator);
  if (fields.size() < 17 + SEQUENCE_COUNT)
    return status;
  status.known = true;
  auto next = fields.begin();
  const auto integer = [&] { return std::strtoll((next++)->c_str(), nullptr, 10); };
  const auto time = [&] { return 1e-3 * static_cast<double>(integer()); };
  status.left = integer() != 0;
  status.stage = integer();
  status.phase = static_cast<Phase>(integer());
  status.batches = integer();
  status.phase_since = time();
  status.last = *next++;
  status.busy = *next++;
  status.busy_since = time();
  status.task.what = *next++;
  status.task.updates = integer();
  status.task.updated_at = time();
  status.activity = integer();
  status.wait.sequence = static_cast<int>(integer());
  status.wait.number = integer();
  status.wait.what = *next++;
  status.wait.since = time();
  status.wait.on_device = integer() != 0;
  for (auto& count : status.sequence_numbers) count = integer();
  // Sequences are indices: reject values that other versions or programs have written.
  if (status.wait.sequence < -1 || status.wait.sequence >= SEQUENCE_COUNT)
    status.wait = {};
  return status;
}

std::string RankStatus::describe(double now) const {
  auto text = "rank " + std::to_string(rank);
  if (!known)
    return text + " (no state received yet)";
  if (left)
    return text + " (has finished)";
  text += std::string(": ") + name(phase);
  if (phase == Phase::FORWARD || phase == Phase::BACKWARD || phase == Phase::STEP)
    text += " of training batch " + std::to_string(batches);
  text += " for " + seconds(phase_since, now);
  if (!busy.empty())
    text += ", " + busy + " for " + seconds(busy_since, now);
  else if (is_waiting())
    text += std::string(", ") + (wait.on_device ? "its device waits" : "waits") + " in " + wait.what +
            " for " + seconds(wait.since, now);
  if (has_task())
    text += ", " + task.what +
            (now - task.updated_at > kNoProgress ? ", without progress for " + seconds(task.updated_at, now)
                                                 : "");
  if (!last.empty())
    text += ", last used parameter '" + last + "'";
  return text;
}

namespace {

// Devices and host exchanges count with 32 bits, which wrap.
bool is_behind(const RankStatus& status, SequenceId sequence, int64_t number) {
  const auto sequence_number = status.sequence_numbers[static_cast<size_t>(sequence)];
  if (!status.known || sequence < SequenceId::DEVICE_REDUCE)
    return !status.known || sequence_number < number;
  return static_cast<int32_t>(static_cast<uint32_t>(sequence_number) - static_cast<uint32_t>(number)) < 0;
}

// Return true for sequences of the ranks of one host.
bool is_of_host(SequenceId sequence) {
  return sequence == SequenceId::TURN || sequence == SequenceId::DEVICE_REDUCE ||
         sequence == SequenceId::DEVICE_GATHER;
}

bool waits_for_part(const RankStatus& status) {
  return status.is_waiting() && status.wait.sequence == static_cast<int>(SequenceId::PART);
}

// Return the ranks that have not sent a part which some rank of the waiting host lacks. A rank receives a
// part from the ranks with its local rank on other hosts.
std::vector<int64_t> ranks_without_send(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> missing;
  for (const auto& other : all) {
    const bool awaited = std::any_of(all.begin(), all.end(), [&](const RankStatus& peer) {
      return peer.location.host == waiting.location.host &&
             peer.location.local_rank == other.location.local_rank &&
             is_behind(peer, SequenceId::PART, waiting.wait.number);
    });
    if (awaited && other.rank != waiting.rank && is_behind(other, SequenceId::PART_SENT, waiting.wait.number))
      missing.push_back(other.rank);
  }
  return missing;
}

// Return the ranks of the same host that have not received the part.
std::vector<int64_t> ranks_without_part(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> ranks;
  for (const auto& other : all) {
    if (other.location.host == waiting.location.host &&
        is_behind(other, SequenceId::PART, waiting.wait.number))
      ranks.push_back(other.rank);
  }
  return ranks;
}

// Return the ranks whose chains of waits end at this rank.
std::vector<int64_t> ranks_blocked_on(int64_t rank, const std::vector<RankStatus>& all) {
  std::vector<int64_t> ranks;
  for (const auto& other : all) {
    const auto ends = other.rank == rank ? std::vector<int64_t>() : find_blocking_ranks(other, all);
    if (std::find(ends.begin(), ends.end(), rank) != ends.end())
      ranks.push_back(other.rank);
  }
  return ranks;
}

// Say where to look if a part of a host exchange is missing.
std::string describe_missing_part(const RankStatus& mine, const std::vector<int64_t>& missing,
                                  const std::vector<RankStatus>& all) {
  if (missing.empty())
    return " Every rank has sent its part, but it has not arrived at " +
           format_ranks(ranks_without_part(mine, all), all) +
           ": the network between this host and others is slow or broken. Test it with "
           "NCCL_DEBUG=INFO, and select the interface with NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME "
           "on CPUs).";
  return " These weights are read here after " + std::string(missing.size() == 1 ? "it has" : "they have") +
         " sent a part of them: check its output and its host first.";
}

}  // namespace

std::vector<int64_t> find_awaited_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> missing;
  if (!waiting.is_waiting() || waiting.wait.sequence < 0)
    return missing;
  if (waits_for_part(waiting))
    return ranks_without_send(waiting, all);
  const auto sequence = static_cast<SequenceId>(waiting.wait.sequence);
  for (const auto& other : all) {
    const bool takes_part =
        other.rank != waiting.rank && !(is_of_host(sequence) && other.location.host != waiting.location.host);
    if (takes_part && is_behind(other, sequence, waiting.wait.number))
      missing.push_back(other.rank);
  }
  return missing;
}

std::vector<int64_t> find_blocking_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  const auto direct = find_awaited_ranks(waiting, all);
  std::vector<int64_t> ends;
  std::vector<bool> seen(all.size());
  seen[static_cast<size_t>(waiting.rank)] = true;
  auto open = direct;
  while (!open.empty()) {
    const auto rank = static_cast<size_t>(open.back());
    open.pop_back();
    if (seen[rank])
      continue;
    seen[rank] = true;
    const auto& status = all[rank];
    const auto next = status.known && !status.left && status.busy.empty() ? find_awaited_ranks(status, all)
                                                                          : std::vector<int64_t>();
    if (next.empty())
      ends.push_back(status.rank);
    open.insert(open.end(), next.begin(), next.end());
  }
  std::sort(ends.begin(), ends.end());
  return ends.empty() ? direct : ends;
}

std::vector<int64_t> find_lagging_ranks(const std::vector<RankStatus>& all) {
  const auto& first = all.front();
  // Compares hosts: devices are all at the same point while they execute launched work. Parts of an exchange
  // may still be in transit.
  const bool together = first.is_waiting() && first.wait.sequence >= 0 && !waits_for_part(first) &&
                        std::all_of(all.begin(), all.end(), [&](const auto& status) {
                          return status.known && !status.left && status.is_waiting() &&
                                 !status.wait.on_device && status.wait.sequence == first.wait.sequence &&
                                 status.wait.number == first.wait.number;
                        });
  std::vector<int64_t> missing;
  for (const auto sequence :
       {static_cast<size_t>(SequenceId::GATHER), static_cast<size_t>(SequenceId::REDUCE)}) {
    if (!together || !missing.empty())
      break;
    int64_t most = 0;
    for (const auto& status : all) most = std::max(most, status.sequence_numbers[sequence]);
    for (const auto& status : all) {
      if (status.sequence_numbers[sequence] < most)
        missing.push_back(status.rank);
    }
  }
  return missing;
}

bool is_deadlock(const std::vector<RankStatus>& all) {
  if (!find_lagging_ranks(all).empty())
    return std::all_of(all.begin(), all.end(), [](const RankStatus& status) { return status.busy.empty(); });
  bool any = false;
  for (const auto& status : all) {
    if (!status.known || !status.busy.empty())
      return false;
    if (status.left)
      continue;
    if (find_awaited_ranks(status, all).empty())
      return false;
    any = true;
  }
  return any;
}

bool is_idle(const std::vector<RankStatus>& all) {
  return std::all_of(all.begin(), all.end(), [](const RankStatus& status) {
    return status.known && !status.left && status.busy.empty() && !status.has_task() &&
           status.phase != Phase::OUTSIDE && status.phase != Phase::USER_CODE && !status.is_waiting();
  });
}

std::string format_ranks(const std::vector<int64_t>& ranks, const std::vector<RankStatus>& all) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  std::map<int64_t, std::string> hosts;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    if (const auto& status = all[static_cast<size_t>(ranks[i])]; status.location.host >= 0)
      hosts[status.location.host] = status.location.host_name;
  }
  std::string of;
  for (const auto& [host, name] : hosts)
    of += (of.empty() ? "" : ", ") + std::to_string(host) + (name.empty() ? "" : " (" + name + ")");
  return of.empty() ? text : text + (hosts.size() == 1 ? " of host " : " of hosts ") + of;
}

std::string format_report(const std::vector<RankStatus>& all, int64_t rank, double now) {
  const auto& mine = all[static_cast<size_t>(rank)];
  const auto lagging = find_lagging_ranks(all);
  auto missing = lagging.empty() ? find_blocking_ranks(mine, all) : lagging;
  const bool on_its_way = waits_for_part(mine) && missing.empty();
  if (missing.empty() && !on_its_way) {
    for (const auto& other : all) {
      if (other.rank != rank && !other.is_waiting())
        missing.push_back(other.rank);
    }
  }
  std::string text = mine.describe(now) + ".";
  if (mine.is_waiting() && !missing.empty()) {
    text += " Missing: " + format_ranks(missing, all) +
            (lagging.empty() ? "." : ", which did not join collectives that the devices of others wait for.");
  }
  if (waits_for_part(mine))
    text += describe_missing_part(mine, missing, all);
  if (const auto waiting = ranks_blocked_on(rank, all); !mine.is_waiting() && !waiting.empty())
    text += " Waiting for this rank: " + format_ranks(waiting, all) + ".";
  std::string others;
  for (const auto& other : all) {
    if (other.rank != rank)
      others += (others.empty() ? " " : "; ") + other.describe(now);
  }
  return text + (others.empty() ? "" : " The others:" + others + ".");
}

}  // namespace lightning_zero
