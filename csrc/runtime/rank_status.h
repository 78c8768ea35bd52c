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
enum class SequenceId : int { CONTROL, WORLD, GATHER, REDUCE, TURN, DEVICE_REDUCE, DEVICE_GATHER, PART, PART_SENT };
constexpr int LANES = 9;

enum class Phase : int { OUTSIDE, SETUP, BETWEEN, FORWARD, BACKWARD, STEP, EVALUATION };

// What a rank waits for; nothing where `what` is empty.
struct RankWait {
  int lane = -1;  // -1: something that has no number
  int64_t number = 0;
  std::string what;
  double since = 0;        // seconds since the epoch
  bool on_device = false;  // its device waits, but the host may not
};

// Where a rank runs.
struct RankPlace {
  int64_t host = -1, place = 0;  // its place among that host's; negative: there is one host
  std::string host_name;         // empty: not known
};

// What takes long and says how far it is: bytes of a checkpoint, say. Nothing where `what` is empty.
struct RankTask {
  std::string what;     // in words, with how far it is
  int64_t moves = 0;    // changes whenever something more is done
  double moved_at = 0;  // seconds since the epoch
};

struct RankStatus {
  int64_t rank = 0;
  RankPlace at;
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
  std::array<int64_t, LANES> sequence_number{};

  // `hosts`: of each rank, the number of its host; empty where there is one.
  void stands(const std::vector<int64_t>& hosts);
  bool waits() const { return !wait.what.empty(); }
  bool moves() const { return !task.what.empty(); }
  std::string to_text() const;
  static RankStatus from_text(int64_t rank, const std::string& text);
  // "rank 1, forward of training batch 7, for 31 s; last used 'net.0.weight'"
  std::string describe(double now) const;
};

double seconds_since_epoch();

}  // namespace lightning_zero
