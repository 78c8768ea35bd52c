// What Linux tells of processes on this host.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "watchdog/rank_state.h"

namespace c10d {
class Store;
}

namespace lightning_zero {

// A process of this host, or none that can be seen from here.
struct ProcessOnHost {
  int64_t pid = 0;
  std::string started;       // by which a later process of the same number is told apart
  static std::string own();  // what others need to find this one
  static std::optional<ProcessOnHost> find(const std::string& what);
  static std::string host_in(const std::string& what);  // what that host calls itself; empty: not known
  bool is_alive() const;
};

// Kills what this process has forked without exec, or started by Python's multiprocessing: the workers of
// data loaders, which nobody else ends when it ends by std::_Exit(), and which may hang. Not the ranks that
// Lightning's launcher has started.
void kill_forked_children();

std::vector<std::string> split(const std::string& text, char by);

// What ranks tell each other through the key-value store of their process group.

// Every method but tell_failure() is for one thread, and throws where the store is gone.
class RankStateStore {
 public:
  // `hosts`: of each rank, the number of its host; empty where there is one.
  RankStateStore(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size,
                 std::vector<int64_t> hosts);

  // Tells the others how this rank is, if that is news.
  void publish(const RankStatus& mine);
  // How all are; this rank as `mine` says.
  std::vector<RankStatus> statuses(const RankStatus& mine);
  // That rank's process, where it is on this host.
  const std::optional<ProcessOnHost>& process_of(int64_t other);

  // This rank is there; and what that one has written last, which is another text each time. Empty: nothing
  // yet.
  void publish_heartbeat();
  std::string heartbeat_of(int64_t other);

  // From any thread: why this rank ends.
  void publish_failure(int64_t stage, const std::string& kind, const std::string& text);
  bool any_failed(int64_t stage);
  bool has_failed(int64_t stage, int64_t other);
  struct Failure {
    std::string kind, text;
  };
  Failure failure_of(int64_t stage, int64_t other);

 private:
  bool has(const std::string& key);
  std::string get(const std::string& key);
  // What that rank says of its process; none: nothing yet.
  const std::optional<std::string>& process_text(int64_t other);

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_, size_;
  std::vector<int64_t> hosts_;
  std::string published_;
  int64_t beats_ = 0;
  std::vector<bool> known_, asked_, beating_;
  std::vector<std::optional<std::string>> process_texts_;
  std::vector<std::optional<ProcessOnHost>> processes_;
};

// Whether the next host is there. Of what runs there nobody sees the processes, and where all of them are
// gone none is left to tell; NCCL waits for them as long as it is told to.
//
// Every rank writes down, once a second, that it is there, and looks at the one at its place of the next
// host: so each is looked at by one, however many hosts there are. The watchdog's thread does that, which a
// rank that computes, hangs, or holds Python's lock does not keep from it.

class RankStateStore;

// For one thread.
class Heartbeats {
 public:
  // `hosts`: of each rank, the number of its host, of which there are several.
  Heartbeats(int64_t rank, const std::vector<int64_t>& hosts);

  bool reported = false;  // that it is silent, to whom this rank talks

  // The rank that this one looks at.
  int64_t watched() const { return watched_; }
  // Beats, and looks: for how many seconds that rank has not. 0 until it has begun. Time in which this rank
  // itself did nothing does not count: somebody may have stopped all of them.
  double seconds_since_heartbeat(RankStateStore& store);
  // That rank has a reason to be silent so far.
  void reset() { silent_ = 0; }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t watched_;
  Clock::time_point looked_{}, beaten_{};
  std::string last_;
  double silent_ = 0;
};

}  // namespace lightning_zero
