// Waits of a device for those of other ranks, as its kernels tell of them in memory of the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "sync/signal_pads.h"
#include "watchdog/rank_state.h"

namespace lightning_zero {

class DeviceWaits {
 public:
  // `words`: see device_words.h.
  void watch(const at::Tensor& words);
  // Ends all waits, or has devices wait again.
  void release_waits(bool all) const;
  // What this device waits for, where the host waits for nothing, and how far it is.
  void add_to(RankStatus& status);

 private:
  struct Seen {
    int64_t number = 0;
    double since = 0;
  };
  // Kernels wait for `number` of that lane, or are past it.
  void add(RankStatus& status, SequenceId sequence, Seen& seen, int64_t number, bool waits, const char* what);

  at::Tensor words_;
  std::array<Seen, device_words::BARRIERS> barriers_{};
  std::array<Seen, device_words::READERS> parts_{};
};

// Replays of graphs in which devices wait for each other in collectives. Nobody else watches over these: a
// process group hears of a collective when it is captured, and never again.

class ReplayWaits {
 public:
  // `ended`: in memory of the host, how many of all replays that were told of here have ended. The device
  // says so itself: a thread that asked it could be held up by whoever waits for it. `number`: of the last of
  // the replay's meetings in that lane.
  void add(const at::Tensor& ended, SequenceId sequence, int64_t number);
  void forget();
  // The oldest that has not ended, once it takes long and the host waits for nothing.
  void add_to(RankStatus& status);

 private:
  struct Replay {
    SequenceId sequence;
    int64_t number;
    double since;  // it began, or the one before it ended
  };
  void update();

  at::Tensor ended_;
  int64_t seen_ = 0;  // that have ended
  std::deque<Replay> running_;
};

// What this rank is doing and where it waits, as its threads tell of it.

// All methods may be called from any thread.
class RankActivity {
 public:
  // `hosts`: of each rank, the number of its host; empty where there is one.
  RankActivity(int64_t rank, const std::vector<int64_t>& hosts);

  void enter(Phase phase);
  void begin_stage();
  int64_t stage() const;
  // Something that takes its time and is no reason to worry, in words; "" when it is over.
  void busy(std::string what);
  // How far something is that takes long, in words, each time that it is farther; "" when it is over. Others
  // may wait for it as long as that goes on.
  void set_progress(std::string how_far);
  // The parameter that was gathered or reduced last. The name must live as long as this, or until
  // forget_names().
  void set_last_parameter(const std::string& name) { last_.store(&name, std::memory_order_release); }
  void forget_names();

  // This rank has begun, or will take part in, its next meetings of this lane; returns the last one's number.
  int64_t advance(SequenceId sequence, int64_t count = 1);
  // The same for a lane whose numbers somebody else counts.
  void set_sequence_number(SequenceId sequence, int64_t number);
  // It waits for the others to come to that number; -1: in a lane whose meetings are not counted. Returns
  // what end_wait() is given.
  int64_t begin_wait(int sequence, int64_t number, std::string what);
  void end_wait(int64_t id);

  // Hosts exchange weights next, in parts, of which the first has the number `first` + 1. `weights`: of each
  // part, which it holds.
  void set_exchange_parts(int64_t first, std::vector<std::string> weights);

  // See DeviceWaits.
  void watch_device(const at::Tensor& words);
  void release_device_waits(bool all) const;
  // See ReplayWaits.
  void watch_replay(const at::Tensor& ended, SequenceId sequence, int64_t number);
  void forget_replays();

  RankStatus status();

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    int sequence;
    int64_t number;
    std::string what;
    Clock::time_point since;
    int64_t id;
  };

  mutable std::mutex mutex_;
  std::string part(int64_t number) const;

  RankStatus mine_;
  int64_t first_part_ = 0;
  std::vector<std::string> parts_;
  int64_t ids_ = 0;
  std::list<Wait> waits_;  // of all threads, the oldest first
  std::atomic<const std::string*> last_{nullptr};
  std::array<std::atomic<int64_t>, SEQUENCE_COUNT> met_{};
  std::atomic<int64_t> activity_{0};
  DeviceWaits devices_;
  ReplayWaits replays_;
};

}  // namespace lightning_zero
