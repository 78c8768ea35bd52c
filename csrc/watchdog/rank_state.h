// What ranks tell each other about themselves, in words, too. Pure: no store, no threads, no clocks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lightning_zero {

// Kinds of meetings; within one, ranks meet in the same order. DEVICE lanes: barriers that run on a device.
// Each is a process group, or what is like one, except for WORLD: Lightning's own meetings; and for the last
// two, which count parts of what hosts exchange: those that have come to a rank, and those that it has sent.
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

enum class Phase : int { OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION };

// What a rank waits for; nothing where `what` is empty.
struct RankWait {
  int sequence = -1;  // -1: something that has no number
  int64_t number = 0;
  std::string what;
  double since = 0;        // seconds since the epoch
  bool on_device = false;  // its device waits, but the host may not
};

// Where a rank runs.
struct RankLocation {
  int64_t host = -1, local_rank = 0;  // its place among that host's; negative: there is one host
  std::string host_name;              // empty: not known
};

// What takes long and says how far it is: bytes of a checkpoint, say. Nothing where `what` is empty.
struct RankTask {
  std::string what;       // in words, with how far it is
  int64_t updates = 0;    // changes whenever something more is done
  double updated_at = 0;  // seconds since the epoch
};

struct RankStatus {
  int64_t rank = 0;
  RankLocation location;
  bool known = false;  // false: nothing has been heard of it
  bool left = false;   // it has closed its engine, or ended
  int64_t stage = 0;   // how many stages of a Trainer it has begun
  Phase phase = Phase::OUTSIDE;
  int64_t batches = 0;     // training batches that it has begun
  double phase_since = 0;  // seconds since the epoch, as `busy_since`
  std::string last;        // the parameter that it gathered or reduced last
  std::string busy;
  double busy_since = 0;
  RankTask task;
  int64_t activity = 0;  // changes when it does anything that we see
  RankWait wait;
  std::array<int64_t, SEQUENCE_COUNT> sequence_numbers{};

  // `hosts`: of each rank, the number of its host; empty where there is one.
  void set_host(const std::vector<int64_t>& hosts);
  bool is_waiting() const { return !wait.what.empty(); }
  bool has_task() const { return !task.what.empty(); }
  std::string to_text() const;
  static RankStatus from_text(int64_t rank, const std::string& text);
  // "rank 1, forward of training batch 7, for 31 s; last used 'net.0.weight'"
  std::string describe(double now) const;
};

double seconds_since_epoch();

// Which ranks wait for which others, and what follows when all are put side by side. Pure, as rank_status.h.

// The ranks for which this one waits: those that have not come to its meeting. Empty: all have, or it cannot
// be told.
std::vector<int64_t> find_awaited_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all);

// The ranks at the ends of that: those for which the ones it waits for wait in turn, and so on, but for those
// that wait for others themselves. Where each waits for another: the ones it waits for.
std::vector<int64_t> find_blocking_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all);

// The ranks that began fewer collectives than others, although all wait at the same place: devices wait for
// those that never come, and hosts for their devices. Empty: there are none, or it cannot be told.
std::vector<int64_t> find_lagging_ranks(const std::vector<RankStatus>& all);

// Whether no rank can ever go on: each waits for one that does not come, or has left.
bool is_deadlock(const std::vector<RankStatus>& all);

// Whether every rank should be doing something, and none waits where that is seen.
bool is_idle(const std::vector<RankStatus>& all);

// Who is missing, where it was last, and where the others wait.
std::string format_report(const std::vector<RankStatus>& all, int64_t rank, double now);

// "rank 1", "ranks 1, 2 of host 0 (node17)"
std::string format_ranks(const std::vector<int64_t>& ranks, const std::vector<RankStatus>& all);

}  // namespace lightning_zero
