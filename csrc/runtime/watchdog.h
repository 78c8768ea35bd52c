// The Watchdog knows what its rank is doing and where it waits, tells the other ranks, and hears from them:
// by rank_activity.h, rank_board.h, wait_judge.h (how long is too long) and rank_end.h (whether it must not
// go on). When ranks wait for one that does not come, it says which one and where it was last; when nobody
// can come any more, it ends the waits. Its thread needs neither the GIL nor the device.
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
// see each other, so that one that was killed is missed at once, and the other hosts are told. A host that is
// gone with all of its ranks is missed by the next one, see heartbeats.h.
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

#include "runtime/rank_activity.h"
#include "runtime/rank_end.h"
#include "runtime/wait_judge.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace lightning_zero {

class RankBoard;
class Heartbeats;

class Watchdog : public c10::intrusive_ptr_target {
 public:
  using Clock = std::chrono::steady_clock;

  // `group_name`: a process group of all ranks that are watched, whose store they share.
  // `report_s`: a wait that takes longer is reported; `timeout_s`: one that takes longer ends the process.
  // `hosts`: of each rank, the number of its host; empty where there is one.
  Watchdog(const std::string& group_name, double report_s, double timeout_s, std::vector<int64_t> hosts);
  ~Watchdog() override;

  // -- what this rank does

  // See RankActivity.
  RankActivity& activity() { return activity_; }
  void enter(int64_t phase) { activity_.enter(static_cast<Phase>(phase)); }
  void busy(std::string what) { activity_.busy(std::move(what)); }
  void moved(std::string how_far) { activity_.moved(std::move(how_far)); }
  // Waits for `work`, which is the `number`-th meeting of that lane. Throws what has gone wrong, see
  // on_abort().
  void wait(c10d::Work& work, SequenceId lane, int64_t number, const char* what);
  // Surrounds a wait for the others to come to that number.
  class Waiting {
   public:
    Waiting(Watchdog& watchdog, SequenceId lane, int64_t number, std::string what);
    ~Waiting() { activity_.end_wait(id_); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    RankActivity& activity_;
    int64_t id_;
  };
  // A wait of somebody else's, that cannot be ended from here. `lane`: -1 where ranks do not come in step.
  // Returns what end_wait() is given.
  int64_t begin_wait(int64_t lane, std::string what);
  void end_wait(int64_t id) { activity_.end_wait(id); }
  // Errors that the group's own watchdog finds, where it has one: NCCL's.
  void watch_group(const std::string& group_name);
  // Another time after which a wait is reported, also one that goes on now.
  void set_report_interval(double report_s);

  // -- how it ends

  // See RankEnd.
  void on_abort(std::string op) { end_.on_abort(std::move(op)); }
  // A stage begins that all ranks take part in: what failed before is over.
  void begin() { end_.begin(); }
  // An exception ends what this rank does. `text` tells the others which.
  void fail(const std::string& text);
  // A connection to another rank broke: if it is heard that one has failed, that is why, and this rank need
  // not be given time to fail by itself.
  void skip_grace_period() { end_.skip_grace_period(); }
  // Throws when this rank must not go on.
  void check() { end_.check(); }
  // Throws what all ranks have found together, and need not tell each other.
  [[noreturn]] void refuse(const std::string& text) { end_.raise("mismatch", text); }
  // Why; empty while nothing is wrong.
  std::string abort_reason() const { return end_.abort_reason(); }
  // The rank leaves, and is not missed.
  void close();
  // The process leaves. After a failure it may hang at its very end, for peers that are gone: it is not given
  // long.
  void leave();

 private:
  // In watchdog_thread.cpp:
  void run();
  void look();
  void end_where_the_device_is_left();
  bool look_for_failures(const RankStatus& mine);
  bool look_for_deaths(const RankStatus& mine);
  bool look_for_silence(const RankStatus& mine);
  bool look_at_backends(const RankStatus& mine);
  // This rank has found something, of which it tells the others, or has heard of it from one of them. `rest`:
  // of the text, for this rank alone.
  void end(const std::string& kind, const std::string& text, const std::string& rest = {});
  void end_as_told(const std::string& kind, const std::string& text);
  void say(const std::string& text) const;

  int64_t rank_ = 0, size_ = 1;
  RankActivity activity_;
  RankEnd end_;
  std::unique_ptr<RankBoard> board_;    // null where there is one rank
  std::unique_ptr<Heartbeats> hearts_;  // null where there is one host
  WaitJudge judge_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  double report_s_;  // what judge_, which is the thread's, is told at each look
  std::vector<std::pair<std::string, c10::intrusive_ptr<c10d::Backend>>> backends_;  // that know of errors

  // Of the process that made the thread: a fork has none, and must not wait for it.
  const int64_t process_;

  // The thread's own.
  struct Since {  // what must not last began; never: it is not so
    Clock::time_point store_lost{}, device_left{};
  } since_;
  struct Failure {
    Clock::time_point at;
    std::string kind, text;
  };
  struct OtherFailed {
    int64_t stage = -1;            // in which others were asked last
    std::optional<Failure> found;  // there
  } other_failed_;
  std::thread thread_;
};

}  // namespace lightning_zero
