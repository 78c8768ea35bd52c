// The Watchdog knows what its rank is doing and where it waits, tells the other ranks, and hears from them.
// When ranks wait for one that does not come, it says which one and where it was last; when nobody can come
// any more, it ends the waits. Its thread needs neither the GIL nor the device.
//
// Meetings of ranks are counted, by lane: the n-th of a lane on one rank is the n-th on every other. A rank
// that waits for meeting n of a lane is held up by those that have not come to it yet. When every rank waits
// and is held up, no rank can go on, and waiting longer changes nothing.
//
// [Note: how ranks end] A rank on which an exception ends the training says so (fail). The others are given a
// moment to fail by themselves, as they do when the mistake is in the model; then their waits throw, on
// devices barriers let everybody pass, and a process that is not in any of our waits and does not end by
// itself is ended. Nothing is done once this rank has failed, too: its exception is the one that users should
// see.
//
// Ranks talk through the store of the process group, over a connection of their own; processes of one host
// see each other, so that one that was killed is missed at once.
#pragma once

#include <torch/custom_class.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/process_on_host.h"
#include "runtime/rank_status.h"

namespace lightning_zero {

class Watchdog : public torch::CustomClassHolder {
 public:
  using Clock = std::chrono::steady_clock;

  // `group_name`: a process group of all ranks that are watched, whose store they share.
  // `report_s`: a wait that takes longer is reported; `timeout_s`: one that takes longer ends the process.
  Watchdog(const std::string& group_name, double report_s, double timeout_s);
  ~Watchdog() override { close(); }

  // -- what this rank does

  void enter(int64_t phase);
  // Something that takes its time and is no reason to worry, in words; "" when it is over.
  void busy(std::string what);
  // The parameter that was gathered or reduced last. The name must live as long as this.
  void touch(const std::string& name) { last_.store(&name, std::memory_order_relaxed); }
  void forget_names();
  // This rank has begun, or will take part in, its next meeting of this lane; returns its number.
  int64_t meet(Lane lane);
  // The same for a lane whose numbers somebody else counts.
  void reach(Lane lane, int64_t number);
  // Waits for it. Throws what has gone wrong, see on_end().
  void wait(c10d::Work& work, Lane lane, int64_t number, const char* what);
  // Surrounds a wait for the others to come to that number.
  class Waiting {
   public:
    Waiting(Watchdog& watchdog, Lane lane, int64_t number, const char* what);
    ~Waiting() { watchdog_.end_wait(id_); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Watchdog& watchdog_;
    int64_t id_;
  };
  // A wait of somebody else's, that cannot be ended from here. `lane`: -1 where ranks do not come in step.
  // Returns what end_wait() is given.
  int64_t begin_wait(int64_t lane, std::string what);
  void end_wait(int64_t id);
  // Barriers on a device, which write to memory of the host, for each of DEVICE_LANES: how many this device
  // has come to, and how many it has passed. `abort`: where it reads that it must not wait any more.
  void watch_device(const at::Tensor& words);
  // Errors that the group's own watchdog finds, where it has one: NCCL's.
  void watch_group(const std::string& group_name);

  // -- how it ends

  // Name of an op `(str kind, str text) -> ()` that raises. Without one a plain error is thrown.
  void on_end(std::string op) { end_op_ = std::move(op); }
  // A stage begins that all ranks take part in: what failed before is over.
  void begin();
  // An exception ends what this rank does. `text` tells the others which.
  void fail(const std::string& text);
  // A connection to another rank broke: if it is heard that one has failed, that is why, and this rank need
  // not be given time to fail by itself.
  void hurry();
  // Throws when this rank must not go on.
  void check();
  // Why; empty while nothing is wrong.
  std::string verdict() const;
  // The rank leaves, and is not missed.
  void close();
  // The process leaves. After a failure it may hang at its very end, for peers that are gone: it is not given
  // long.
  void leave();

  int64_t rank() const { return rank_; }

 private:
  struct Wait {
    int lane;  // -1: one whose meetings are not counted
    int64_t number;
    std::string what;
    Clock::time_point since;
    int64_t id;
  };

  int64_t note_wait(int lane, int64_t number, std::string what);
  void let_devices_pass(bool all);  // or have them wait again

  // In watchdog_thread.cpp:
  void run();
  void look();
  void publish(const RankStatus& mine);
  bool look_for_failures(const RankStatus& mine);
  bool look_for_deaths(const RankStatus& mine);
  bool look_at_backends(const RankStatus& mine);
  void look_at_waits(const RankStatus& mine);
  RankStatus own();
  void add_device_wait(RankStatus& status);
  std::vector<RankStatus> statuses();
  bool has(const std::string& key);
  std::string get(const std::string& key);
  void end(const std::string& kind, const std::string& text);
  void say(const std::string& text) const;

  void tell(const std::string& kind, const std::string& text);  // the others, why this rank ends
  [[noreturn]] void raise();
  static std::string key(const std::string& what, int64_t rank);

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_, size_;
  std::chrono::duration<double> report_, timeout_;
  std::string end_op_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  RankStatus mine_;
  int64_t ids_ = 0;
  std::list<Wait> waits_;  // of all threads, the oldest first
  std::atomic<const std::string*> last_{nullptr};
  std::array<std::atomic<int64_t>, LANES> met_{};
  std::atomic<int64_t> activity_{0};

  at::Tensor device_words_;
  std::vector<std::pair<std::string, c10::intrusive_ptr<c10d::Backend>>> backends_;  // that know of errors

  bool failed_ = false;  // this rank, by itself
  bool told_ = false;    // a wait has thrown, so that somebody knows that this process should end
  std::atomic<bool> ending_{false}, hurried_{false};
  std::string kind_, text_;  // of the end

  // The thread's own.
  struct SeenOnDevice {
    int64_t arrived = 0;
    double since = 0;
  };
  std::array<SeenOnDevice, DEVICE_LANES> on_device_{};
  std::string published_;
  std::vector<std::optional<ProcessOnHost>> processes_;
  std::vector<bool> known_, asked_;
  int64_t seen_activity_ = -1, looked_stage_ = -1;
  Clock::time_point quiet_since_{}, next_look_{}, stuck_since_{}, store_lost_{}, deadline_{};
  double reported_after_ = 0, still_after_ = 0;
  Clock::time_point still_since_{};
  std::vector<int64_t> stuck_at_, all_at_;
  struct Failure {
    Clock::time_point at;
    std::string kind, text;
  };
  std::optional<Failure> other_failed_;
  std::thread thread_;
};

}  // namespace lightning_zero
