// The state that ranks exchange through the key-value store of their process group: status, processes,
// heartbeats, failures.
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

// A process of this host.
struct ProcessOnHost {
  int64_t pid = 0;
  std::string started;       // start time, which distinguishes it from later processes with the same id
  static std::string own();  // returns a text by which others find this process
  static std::optional<ProcessOnHost> find(const std::string& what);
  static std::string host_in(const std::string& what);  // the host's name; empty: unknown
  bool is_alive() const;
};

// Kill children that this process forked without exec, or started by Python's multiprocessing: data loader
// workers, which would survive std::_Exit() and may hang. Ranks that Lightning's launcher started are spared.
void kill_forked_children();

std::vector<std::string> split(const std::string& text, char by);

// Only publish_failure() is thread-safe. All methods throw if the store is gone.
class RankStateStore {
 public:
  // `hosts`: the host index of each rank; empty with one host.
  RankStateStore(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size,
                 std::vector<int64_t> hosts);

  // Publish this rank's status if it changed.
  void publish(const RankStatus& mine);
  // Return all statuses, with `mine` for this rank.
  std::vector<RankStatus> statuses(const RankStatus& mine);
  // Return that rank's process, if it is on this host.
  const std::optional<ProcessOnHost>& process_of(int64_t other);

  // Publish a heartbeat; return the last one of another rank, a different text each time, or "" before the
  // first.
  void publish_heartbeat();
  std::string heartbeat_of(int64_t other);

  // Publish why this rank ends. Any thread may call this.
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
  // Return that rank's description of its process; none if unknown.
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

// Detects that another host is gone. Its processes are not visible from here, no rank of it is left to
// report, and NCCL waits until its timeout.
//
// Every rank publishes a heartbeat once a second and observes the rank with its local rank on the next host.
// So each rank has one observer, for any number of hosts. The watchdog's thread does this, independent of a
// rank that computes, hangs or holds the GIL.
class RankStateStore;

// For one thread.
class Heartbeats {
 public:
  // `hosts`: the host index of each rank; at least two hosts.
  Heartbeats(int64_t rank, const std::vector<int64_t>& hosts);

  bool reported = false;  // the silence has been reported

  // the observed rank
  int64_t watched() const { return watched_; }
  // Publish a heartbeat, and return the seconds since the observed rank's last one; 0 before its first. Time
  // in which this rank was stopped does not count, since all ranks may have been stopped.
  double seconds_since_heartbeat(RankStateStore& store);
  // The observed rank has a reason to be silent.
  void reset() { silent_ = 0; }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t watched_;
  Clock::time_point checked_{}, published_at_{};
  std::string last_;
  double silent_ = 0;
};

}  // namespace lightning_zero
