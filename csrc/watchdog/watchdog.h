// Observes this rank's activity and waits, publishes them to other ranks and receives theirs
// (rank_activity.h, rank_state_store.h). stall_policy.h decides when a wait is too long, and rank_abort.h
// whether this rank must not continue. If ranks wait for one that does not arrive, the watchdog names that
// rank and its last state. If no rank can continue, it ends the waits. Its thread needs neither the GIL nor
// the device.
//
// Collectives are counted per sequence: the n-th of a sequence on one rank matches the n-th on every other. A
// rank that waits for collective n is blocked by the ranks that have not reached n. If every rank waits and
// is blocked, none can continue.
//
// [Note: how ranks end] A rank on which an exception ends training reports it (fail). The others get a grace
// period to fail by themselves, as they do for an error in the model. After that their waits throw, and
// barriers release their devices. A process that is in none of our waits and does not end by itself is
// killed. Nothing is done after this rank has failed too, since users should see its own exception.
//
// Ranks communicate through the process group's store, with a separate connection. Processes of one host see
// each other, so a killed process is noticed immediately, and other hosts are told. If all ranks of a host
// are gone, the next host notices, see Heartbeats.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "watchdog/rank_abort.h"
#include "watchdog/rank_activity.h"
#include "watchdog/stall_policy.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace lightning_zero {

class RankStateStore;
class Heartbeats;

class Watchdog : public c10::intrusive_ptr_target {
 public:
  using Clock = std::chrono::steady_clock;

  // `group_name`: a process group of all observed ranks, whose store they share. `report_s`: seconds after
  // which a wait is reported. `timeout_s`: seconds after which a wait ends the process. `hosts`: the host
  // index of each rank; empty with one host.
  Watchdog(const std::string& group_name, double report_s, double timeout_s, std::vector<int64_t> hosts);
  ~Watchdog() override;

  // ---- activity of this rank

  // See RankActivity.
  RankActivity& activity() { return activity_; }
  void enter(int64_t phase) { activity_.enter(static_cast<Phase>(phase)); }
  void busy(std::string what) { activity_.busy(std::move(what)); }
  void set_progress(std::string how_far) { activity_.set_progress(std::move(how_far)); }
  // Wait for `work`, collective `number` of the sequence. Throw if this rank must abort, see on_abort().
  void wait(c10d::Work& work, SequenceId sequence, int64_t number, const char* what);
  // Marks a scope as a wait for others to reach `number`.
  class Waiting {
   public:
    Waiting(Watchdog& watchdog, SequenceId sequence, int64_t number, std::string what);
    ~Waiting() { activity_.end_wait(id_); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    RankActivity& activity_;
    int64_t id_;
  };
  // Begin a wait that cannot be ended from here. `sequence`: -1 if it is not numbered. Return an id for
  // end_wait().
  int64_t begin_wait(int64_t sequence, std::string what);
  void end_wait(int64_t id) { activity_.end_wait(id); }
  // Observe errors of the group's own watchdog (NCCL).
  void watch_group(const std::string& group_name);
  // Set the seconds after which a wait is reported, also for current waits.
  void set_report_interval(double report_s);

  // ---- end of this rank

  // See RankAbort.
  void on_abort(std::string op) { abort_.on_abort(std::move(op)); }
  // Begin a stage of all ranks: earlier failures no longer count.
  void begin_stage() { abort_.begin_stage(); }
  // An exception ends this rank. `text`: tells other ranks which.
  void fail(const std::string& text);
  // A connection to another rank broke. If a failure of another rank is known, abort without a grace period.
  void skip_grace_period() { abort_.skip_grace_period(); }
  // Throw if this rank must not continue.
  void check() { abort_.check(); }
  // Throw an error that all ranks have found, so that no rank must be told.
  [[noreturn]] void refuse(const std::string& text) { abort_.raise("mismatch", text); }
  // empty without an abort
  std::string abort_reason() const { return abort_.abort_reason(); }
  // Leave: other ranks no longer wait for this one.
  void close();
  // The process exits. After a failure it may hang at exit because peers are gone, so it is killed after a
  // few seconds.
  void limit_exit_time();

 private:
  // ---- in the thread
  void run();
  void poll();
  void exit_if_device_stuck();
  bool check_failures(const RankStatus& mine);
  bool check_processes(const RankStatus& mine);
  bool check_heartbeats(const RankStatus& mine);
  bool check_backends(const RankStatus& mine);
  // abort_all(): this rank found an error and tells the others. abort_rank(): another rank told it. `rest`:
  // text for this rank only.
  void abort_all(const std::string& kind, const std::string& text, const std::string& rest = {});
  void abort_rank(const std::string& kind, const std::string& text);
  void print(const std::string& text) const;

  int64_t rank_ = 0, size_ = 1;
  RankActivity activity_;
  RankAbort abort_;
  std::unique_ptr<RankStateStore> store_;   // null with one rank
  std::unique_ptr<Heartbeats> heartbeats_;  // null with one host
  StallPolicy stall_policy_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  double report_s_;  // passed to stall_policy_, which the thread owns, at each poll
  std::vector<std::pair<std::string, c10::intrusive_ptr<c10d::Backend>>> backends_;  // that report errors

  // The process that created the thread. A fork has no thread and must not join it.
  const int64_t process_;

  // ---- state of the thread
  struct Since {  // beginning of a state that must not last; never: not in it
    Clock::time_point store_lost{}, device_left{};
  } since_;
  struct Failure {
    Clock::time_point at;
    std::string kind, text;
  };
  struct OtherFailed {
    int64_t stage = -1;            // in which other ranks were last checked
    std::optional<Failure> found;  // in that stage
  } other_failed_;
  std::thread thread_;
};

}  // namespace lightning_zero
