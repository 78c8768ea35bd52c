// Waits of this rank's device and host for other ranks, and its current phase.
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
  // `words`: see signal_pads.h.
  void watch(const at::Tensor& words);
  // End all waits of the device, or let it wait again.
  void release_waits(bool all) const;
  // Add the device's progress, and its wait if the host waits for nothing.
  void add_to(RankStatus& status);

 private:
  struct Seen {
    int64_t number = 0;
    double since = 0;
  };
  // Kernels wait for `number` of the sequence, or have passed it.
  void add(RankStatus& status, SequenceId sequence, Seen& seen, int64_t number, bool waits, const char* what);

  at::Tensor words_;
  std::array<Seen, device_words::BARRIERS> barriers_{};
  std::array<Seen, device_words::READERS> parts_{};
};

// Replayed graphs with collectives in which devices wait for each other. A process group sees a collective at
// its capture only, so its watchdog does not observe replays.
class ReplayWaits {
 public:
  // `ended`: number of ended replays among those added here, in host memory. The device writes it itself,
  // because a thread that queried the device could block. `number`: of the replay's last collective in the
  // sequence.
  void add(const at::Tensor& ended, SequenceId sequence, int64_t number);
  void forget();
  // Add the oldest replay that has not ended, if it is slow and the host waits for nothing.
  void add_to(RankStatus& status);

 private:
  struct Replay {
    SequenceId sequence;
    int64_t number;
    double since;  // its beginning, or the end of the previous replay
  };
  void update();

  at::Tensor ended_;
  int64_t seen_ = 0;  // number of ended replays
  std::deque<Replay> running_;
};

// The state of this rank, as its threads report it. Any thread may call any method.
class RankActivity {
 public:
  // `hosts`: the host index of each rank; empty with one host.
  RankActivity(int64_t rank, const std::vector<int64_t>& hosts);

  void enter(Phase phase);
  void begin_stage();
  int64_t stage() const;
  // Describe a long task for which others must not report this rank; "" at its end.
  void busy(std::string what);
  // Describe the progress of a long task, whenever there is some; "" at its end. Others may wait for it while
  // it progresses.
  void set_progress(std::string how_far);
  // Set the last parameter that was gathered or reduced. The name must live until forget_names().
  void set_last_parameter(const std::string& name) { last_.store(&name, std::memory_order_release); }
  void forget_names();

  // This rank begins its next `count` collectives of the sequence. Return the number of the last one.
  int64_t advance(SequenceId sequence, int64_t count = 1);
  // Set the number of a sequence that is counted elsewhere.
  void set_sequence_number(SequenceId sequence, int64_t number);
  // The rank waits for others to reach `number`; -1: in an uncounted sequence. Return an id for end_wait().
  int64_t begin_wait(int sequence, int64_t number, std::string what);
  void end_wait(int64_t id);

  // An exchange between hosts begins, whose parts are numbered from `first` + 1. `weights`: describes each
  // part.
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
  std::list<Wait> waits_;  // of all threads, oldest first
  std::atomic<const std::string*> last_{nullptr};
  std::array<std::atomic<int64_t>, SEQUENCE_COUNT> met_{};
  std::atomic<int64_t> activity_{0};
  DeviceWaits devices_;
  ReplayWaits replays_;
};

}  // namespace lightning_zero
