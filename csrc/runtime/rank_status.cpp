#include "runtime/rank_status.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "runtime/process_on_host.h"

namespace lightning_zero {

namespace {

constexpr char kSeparator = '\n';

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

// Devices count with 32 bits, over and over.
bool is_behind(int64_t met, int64_t number, int lane) {
  if (lane < static_cast<int>(Lane::DEVICE_REDUCE))
    return met < number;
  return static_cast<int32_t>(static_cast<uint32_t>(met) - static_cast<uint32_t>(number)) < 0;
}

std::string of_ranks(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string RankStatus::to_text() const {
  std::string out;
  const auto add = [&](const std::string& value) { (out += value) += kSeparator; };
  const auto whole = [&](int64_t value) { add(std::to_string(value)); };
  const auto time = [&](double value) { whole(std::llround(1000 * value)); };
  whole(left);
  whole(stage);
  whole(static_cast<int64_t>(phase));
  whole(batches);
  time(phase_since);
  add(clean(last));
  add(clean(busy));
  time(busy_since);
  whole(activity);
  whole(wait.lane);
  whole(wait.number);
  add(clean(wait.what));
  time(wait.since);
  whole(wait.on_device);
  for (const auto count : met) whole(count);
  return out;
}

RankStatus RankStatus::from_text(int64_t rank, const std::string& text) {
  RankStatus status;
  status.rank = rank;
  const auto fields = split(text, kSeparator);
  if (fields.size() < 14 + LANES)
    return status;
  status.known = true;
  auto next = fields.begin();
  const auto whole = [&] { return std::strtoll((next++)->c_str(), nullptr, 10); };
  const auto time = [&] { return 1e-3 * static_cast<double>(whole()); };
  status.left = whole() != 0;
  status.stage = whole();
  status.phase = static_cast<Phase>(whole());
  status.batches = whole();
  status.phase_since = time();
  status.last = *next++;
  status.busy = *next++;
  status.busy_since = time();
  status.activity = whole();
  status.wait.lane = static_cast<int>(whole());
  status.wait.number = whole();
  status.wait.what = *next++;
  status.wait.since = time();
  status.wait.on_device = whole() != 0;
  for (auto& count : status.met) count = whole();
  return status;
}

std::string RankStatus::describe(double now) const {
  auto text = "rank " + std::to_string(rank);
  if (!known)
    return text + " (nothing heard of it yet)";
  if (left)
    return text + " (has ended its part)";
  text += std::string(": ") + name(phase);
  if (phase == Phase::FORWARD || phase == Phase::BACKWARD || phase == Phase::STEP)
    text += " of training batch " + std::to_string(batches);
  text += " for " + seconds(phase_since, now);
  if (!busy.empty())
    text += ", " + busy + " for " + seconds(busy_since, now);
  else if (waits())
    text += std::string(", ") + (wait.on_device ? "its device waits" : "waits") + " in " + wait.what +
            " for " + seconds(wait.since, now);
  if (!last.empty())
    text += ", last used parameter '" + last + "'";
  return text;
}

std::vector<int64_t> held_up_by(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> missing;
  if (!waiting.waits() || waiting.wait.lane < 0)
    return missing;
  for (const auto& other : all) {
    if (other.rank != waiting.rank &&
        (!other.known || is_behind(other.met[waiting.wait.lane], waiting.wait.number, waiting.wait.lane)))
      missing.push_back(other.rank);
  }
  return missing;
}

std::vector<int64_t> left_behind(const std::vector<RankStatus>& all) {
  const auto& first = all.front();
  // Of hosts: devices are all at the same place while they compute what all have launched.
  const bool together =
      first.waits() && first.wait.lane >= 0 && std::all_of(all.begin(), all.end(), [&](const auto& status) {
        return status.known && !status.left && status.waits() && !status.wait.on_device &&
               status.wait.lane == first.wait.lane && status.wait.number == first.wait.number;
      });
  std::vector<int64_t> missing;
  for (const auto lane : {static_cast<size_t>(Lane::GATHER), static_cast<size_t>(Lane::REDUCE)}) {
    if (!together || !missing.empty())
      break;
    int64_t most = 0;
    for (const auto& status : all) most = std::max(most, status.met[lane]);
    for (const auto& status : all) {
      if (status.met[lane] < most)
        missing.push_back(status.rank);
    }
  }
  return missing;
}

bool is_deadlock(const std::vector<RankStatus>& all) {
  if (!left_behind(all).empty())
    return std::all_of(all.begin(), all.end(), [](const RankStatus& status) { return status.busy.empty(); });
  bool any = false;
  for (const auto& status : all) {
    if (!status.known || !status.busy.empty())
      return false;
    if (status.left)
      continue;
    if (held_up_by(status, all).empty())
      return false;
    any = true;
  }
  return any;
}

bool is_still(const std::vector<RankStatus>& all) {
  return std::all_of(all.begin(), all.end(), [](const RankStatus& status) {
    return status.known && !status.left && status.busy.empty() && status.phase != Phase::OUTSIDE &&
           !status.waits();
  });
}

std::string report(const std::vector<RankStatus>& all, int64_t rank, double now) {
  const auto& mine = all[static_cast<size_t>(rank)];
  const auto behind = left_behind(all);
  auto missing = behind.empty() ? held_up_by(mine, all) : behind;
  if (missing.empty()) {
    for (const auto& other : all) {
      if (other.rank != rank && !other.waits())
        missing.push_back(other.rank);
    }
  }
  std::string text = mine.describe(now) + ".";
  if (mine.waits() && !missing.empty()) {
    text +=
        " Missing: " + of_ranks(missing) +
        (behind.empty() ? "." : ", which took no part in collectives that the devices of others wait for.");
  }
  std::string others;
  for (const auto& other : all) {
    if (other.rank != rank)
      others += (others.empty() ? " " : "; ") + other.describe(now);
  }
  return text + (others.empty() ? "" : " The others:" + others + ".");
}

}  // namespace lightning_zero
