// The state that ranks publish about themselves, and its analysis: which ranks wait for which others. Pure
// functions: no store, no threads, no clocks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lightning_zero {

// Sequences of collectives, each in one order on all ranks. DEVICE_*: barriers on devices. WORLD: Lightning's
// own collectives. PART, PART_SENT: parts of host exchanges that a rank has received, and sent. The others
// are process groups or similar.
enum class SequenceId : int {
  CONTROL,
  WORLD,
  GATHER,
  REDUCE,
  TURN,
  DEVICE_REDUCE,
  DEVICE_GATHER,
  PART,
  PART_SENT
};
constexpr int SEQUENCE_COUNT = 9;

// USER_CODE: a loop that calls the engine is between its calls, or has ended; the engine cannot know which.
enum class Phase : int { OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION, USER_CODE };

// A wait of a rank; none if `what` is empty.
struct RankWait {
  int sequence = -1;  // -1: not numbered
  int64_t number = 0;
  std::string what;
  double since = 0;        // seconds since the epoch
  bool on_device = false;  // the device waits, while the host may not
};

// The location of a rank.
struct RankLocation {
  int64_t host = -1, local_rank = 0;  // negative: one host
  std::string host_name;              // empty: unknown
};

// A long task that reports progress, such as a checkpoint; none if `what` is empty.
struct RankTask {
  std::string what;       // description, with its progress
  int64_t updates = 0;    // changes with each progress
  double updated_at = 0;  // seconds since the epoch
};

struct RankStatus {
  int64_t rank = 0;
  RankLocation location;
  bool known = false;  // false: nothing has been received from it
  bool left = false;   // it has closed its engine, or ended
  int64_t stage = 0;   // number of Trainer stages it has begun
  Phase phase = Phase::OUTSIDE;
  int64_t batches = 0;     // training batches it has begun
  double phase_since = 0;  // seconds since the epoch, like `busy_since`
  std::string last;        // last parameter it gathered or reduced
  std::string busy;
  double busy_since = 0;
  RankTask task;
  int64_t activity = 0;  // changes with every visible activity
  RankWait wait;
  std::array<int64_t, SEQUENCE_COUNT> sequence_numbers{};

  // `hosts`: the host index of each rank; empty with one host.
  void set_host(const std::vector<int64_t>& hosts);
  bool is_waiting() const { return !wait.what.empty(); }
  bool has_task() const { return !task.what.empty(); }
  std::string to_text() const;
  static RankStatus from_text(int64_t rank, const std::string& text);
  // "rank 1: forward of training batch 7 for 31 s, last used parameter 'net.0.weight'"
  std::string describe(double now) const;
};

double seconds_since_epoch();

// ---- analysis of all ranks' states

// Return the ranks that this one waits for, which have not reached its collective. Empty if all have, or if
// unknown.
std::vector<int64_t> find_awaited_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all);

// Return the ends of the chains of waits that begin here, except ranks that wait themselves. In a cycle: the
// ranks that this one waits for.
std::vector<int64_t> find_blocking_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all);

// Return the ranks that began fewer collectives than others, although all wait at the same point: devices
// wait for the missing collectives, and hosts for their devices. Empty if there are none, or if unknown.
std::vector<int64_t> find_lagging_ranks(const std::vector<RankStatus>& all);

// Return true if no rank can continue: each waits for one that does not arrive or has left.
bool is_deadlock(const std::vector<RankStatus>& all);

// Return true if every rank should be active and none waits visibly.
bool is_idle(const std::vector<RankStatus>& all);

// Describe the missing ranks and their last state, and where the others wait.
std::string format_report(const std::vector<RankStatus>& all, int64_t rank, double now);

// "rank 1", "ranks 1, 2 of host 0 (node17)"
std::string format_ranks(const std::vector<int64_t>& ranks, const std::vector<RankStatus>& all);

}  // namespace lightning_zero
