#include "runtime/rank_board.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lightning_zero {

namespace {

std::string key(const std::string& what, int64_t rank) {
  return "lightning_zero/watchdog/" + what + "/" + std::to_string(rank);
}

std::string failed_key(int64_t stage, int64_t rank) {
  return key("failed/" + std::to_string(stage), rank);
}

}  // namespace

RankStateStore::RankStateStore(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size,
                     std::vector<int64_t> hosts)
    : store_(std::move(store)), rank_(rank), size_(size), hosts_(std::move(hosts)) {
  processes_.resize(static_cast<size_t>(size));
  known_.resize(static_cast<size_t>(size));
  asked_.resize(static_cast<size_t>(size));
  beating_.resize(static_cast<size_t>(size));
  process_texts_.resize(static_cast<size_t>(size));
}

bool RankStateStore::has(const std::string& key) {
  return store_->check({key});
}

std::string RankStateStore::get(const std::string& key) {
  const auto bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

void RankStateStore::publish(const RankStatus& mine) {
  if (published_.empty())
    store_->set(key("process", rank_), ProcessOnHost::own());
  auto text = mine.to_text();
  if (text == published_)
    return;
  store_->set(key("status", rank_), text);
  published_ = std::move(text);
}

std::vector<RankStatus> RankStateStore::statuses(const RankStatus& mine) {
  std::vector<RankStatus> all;
  for (int64_t other = 0; other < size_; ++other) {
    if (other == rank_) {
      all.push_back(mine);
      continue;
    }
    if (!known_[other])
      known_[other] = has(key("status", other));
    all.push_back(RankStatus::from_text(other, known_[other] ? get(key("status", other)) : ""));
  }
  for (auto& status : all) {
    status.set_host(hosts_);
    if (status.location.host >= 0)
      status.location.host_name = ProcessOnHost::host_in(process_text(status.rank).value_or(""));
  }
  return all;
}

const std::optional<std::string>& RankStateStore::process_text(int64_t other) {
  auto& text = process_texts_[other];
  if (!text && has(key("process", other)))
    text = get(key("process", other));
  return text;
}

const std::optional<ProcessOnHost>& RankStateStore::process_of(int64_t other) {
  // What is told apart as hosts is taken for hosts that do not see each other.
  if (asked_[other] || (!hosts_.empty() && hosts_[other] != hosts_[rank_]))
    return processes_[other];
  if (const auto& text = process_text(other)) {
    asked_[other] = true;
    processes_[other] = ProcessOnHost::find(*text);
  }
  return processes_[other];
}

void RankStateStore::publish_heartbeat() {
  // Another text than those of a watchdog that this process had before, too.
  store_->set(key("beat", rank_), std::to_string(seconds_since_epoch()) + " " + std::to_string(++beats_));
}

std::string RankStateStore::heartbeat_of(int64_t other) {
  if (!beating_[other])
    beating_[other] = has(key("beat", other));
  return beating_[other] ? get(key("beat", other)) : "";
}

void RankStateStore::publish_failure(int64_t stage, const std::string& kind, const std::string& text) {
  try {
    store_->set(failed_key(stage, rank_), kind + "|" + text);
    store_->add("lightning_zero/watchdog/failures/" + std::to_string(stage), 1);
  } catch (const std::exception&) {
    // The store is gone, and with it whoever could be told.
  }
}

bool RankStateStore::any_failed(int64_t stage) {
  return store_->add("lightning_zero/watchdog/failures/" + std::to_string(stage), 0) != 0;
}

bool RankStateStore::has_failed(int64_t stage, int64_t other) {
  return has(failed_key(stage, other));
}

RankStateStore::Failure RankStateStore::failure_of(int64_t stage, int64_t other) {
  const auto told = get(failed_key(stage, other));
  const auto bar = told.find('|');
  return {told.substr(0, bar), told.substr(bar + 1)};
}

}  // namespace lightning_zero
