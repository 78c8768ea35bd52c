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
constexpr double kStands = 5;  // seconds after which it is said that nothing more was done

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

}  // namespace

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void RankStatus::stands(const std::vector<int64_t>& hosts) {
  if (hosts.empty())
    return;
  const auto own = hosts.begin() + rank;
  at.host = *own;
  at.place = std::count(hosts.begin(), own, at.host);
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
  add(clean(task.what));
  whole(task.moves);
  time(task.moved_at);
  whole(activity);
  whole(wait.lane);
  whole(wait.number);
  add(clean(wait.what));
  time(wait.since);
  whole(wait.on_device);
  for (const auto count : sequence_number) whole(count);
  return out;
}

RankStatus RankStatus::from_text(int64_t rank, const std::string& text) {
  RankStatus status;
  status.rank = rank;
  const auto fields = split(text, kSeparator);
  if (fields.size() < 17 + LANES)
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
  status.task.what = *next++;
  status.task.moves = whole();
  status.task.moved_at = time();
  status.activity = whole();
  status.wait.lane = static_cast<int>(whole());
  status.wait.number = whole();
  status.wait.what = *next++;
  status.wait.since = time();
  status.wait.on_device = whole() != 0;
  for (auto& count : status.sequence_number) count = whole();
  // Lanes are indices: what another version, or somebody else, has written must not be one that is not there.
  if (status.wait.lane < -1 || status.wait.lane >= LANES)
    status.wait = {};
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
  if (moves())
    text += ", " + task.what +
            (now - task.moved_at > kStands ? ", and nothing more for " + seconds(task.moved_at, now) : "");
  if (!last.empty())
    text += ", last used parameter '" + last + "'";
  return text;
}

}  // namespace lightning_zero
