// What this rank is doing and where it waits, as its threads tell of it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/device_waits.h"
#include "runtime/rank_status.h"
#include "runtime/replay_waits.h"

namespace lightning_zero {

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
  void moved(std::string how_far);
  // The parameter that was gathered or reduced last. The name must live as long as this, or until
  // forget_names().
  void touch(const std::string& name) { last_.store(&name, std::memory_order_release); }
  void forget_names();

  // This rank has begun, or will take part in, its next meetings of this lane; returns the last one's number.
  int64_t meet(SequenceId lane, int64_t meetings = 1);
  // The same for a lane whose numbers somebody else counts.
  void reach(SequenceId lane, int64_t number);
  // It waits for the others to come to that number; -1: in a lane whose meetings are not counted. Returns
  // what end_wait() is given.
  int64_t begin_wait(int lane, int64_t number, std::string what);
  void end_wait(int64_t id);

  // Hosts exchange weights next, in parts, of which the first has the number `first` + 1. `weights`: of each
  // part, which it holds.
  void set_exchange_parts(int64_t first, std::vector<std::string> weights);

  // See DeviceWaits.
  void watch_device(const at::Tensor& words);
  void let_devices_pass(bool all) const;
  // See ReplayWaits.
  void watch_replay(const at::Tensor& ended, SequenceId lane, int64_t number);
  void forget_replays();

  RankStatus status();

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    int lane;
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
  std::array<std::atomic<int64_t>, LANES> met_{};
  std::atomic<int64_t> activity_{0};
  DeviceWaits devices_;
  ReplayWaits replays_;
};

}  // namespace lightning_zero
