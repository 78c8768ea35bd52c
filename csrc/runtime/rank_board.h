// What ranks tell each other through the key-value store of their process group.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/process_on_host.h"
#include "runtime/rank_status.h"

namespace c10d {
class Store;
}

namespace lightning_zero {

// Every method but tell_failure() is for one thread, and throws where the store is gone.
class RankStateStore {
 public:
  // `hosts`: of each rank, the number of its host; empty where there is one.
  RankStateStore(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::vector<int64_t> hosts);

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

}  // namespace lightning_zero
