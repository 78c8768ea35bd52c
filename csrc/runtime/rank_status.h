// What ranks tell each other about themselves, and what follows from it when they are put side by side. Pure:
// no store, no threads, no clocks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lightning_zero {

// Kinds of meetings; within one, ranks meet in the same order. DEVICE lanes: barriers that run on a device.
// Each is a process group, or what is like one, except for WORLD: Lightning's own meetings.
enum class Lane : int { CONTROL, WORLD, GATHER, REDUCE, TURN, DEVICE_REDUCE, DEVICE_GATHER };
constexpr int LANES = 7;
constexpr int DEVICE_LANES = 2;

enum class Phase : int { OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION };

// What a rank waits for; nothing where `what` is empty.
struct RankWait {
  int lane = -1;  // -1: something that has no number
  int64_t number = 0;
  std::string what;
  double since = 0;        // seconds since the epoch
  bool on_device = false;  // its device waits, but the host may not
};

struct RankStatus {
  int64_t rank = 0;
  bool known = false;  // false: nothing has been heard of it
  bool left = false;   // it has closed its engine, or ended
  int64_t stage = 0;   // how many stages of a Trainer it has begun
  Phase phase = Phase::OUTSIDE;
  int64_t batches = 0;     // training batches that it has begun
  double phase_since = 0;  // seconds since the epoch, as `busy_since`
  std::string last;        // the parameter that it gathered or reduced last
  std::string busy;
  double busy_since = 0;
  int64_t activity = 0;  // changes when it does anything that we see
  RankWait wait;
  std::array<int64_t, LANES> met{};

  bool waits() const { return !wait.what.empty(); }
  std::string to_text() const;
  static RankStatus from_text(int64_t rank, const std::string& text);
  // "rank 1, forward of training batch 7, for 31 s; last used 'net.0.weight'"
  std::string describe(double now) const;
};

// The ranks for which this one waits: those that have not come to its meeting. Empty: all have, or it cannot
// be told.
std::vector<int64_t> held_up_by(const RankStatus& waiting, const std::vector<RankStatus>& all);

// The ranks that began fewer collectives than others, although all wait at the same place: devices wait for
// those that never come, and hosts for their devices. Empty: there are none, or it cannot be told.
std::vector<int64_t> left_behind(const std::vector<RankStatus>& all);

// Whether no rank can ever go on: each waits for one that does not come, or has left.
bool is_deadlock(const std::vector<RankStatus>& all);

// Whether every rank should be doing something, and none waits where that is seen.
bool is_still(const std::vector<RankStatus>& all);

// Who is missing, where it was last, and where the others wait.
std::string report(const std::vector<RankStatus>& all, int64_t rank, double now);

double seconds_since_epoch();

}  // namespace lightning_zero
