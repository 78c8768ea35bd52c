#include "runtime/heartbeats.h"

#include <algorithm>

#include "runtime/rank_board.h"
#include "runtime/rank_status.h"

namespace lightning_zero {

namespace {

constexpr std::chrono::duration<double> kBeat{1.0};
constexpr double kMaxBetweenChecks = 1.5;  // seconds; a thread that looks later was stopped, or kept waiting

// At the same place of the next host, and of the first behind the last.
int64_t next_of(int64_t rank, const std::vector<int64_t>& hosts) {
  const auto stands = [&](int64_t of) {
    RankStatus status;
    status.rank = of;
    status.set_host(hosts);
    return status;
  };
  const auto mine = stands(rank);
  const auto count = *std::max_element(hosts.begin(), hosts.end()) + 1;
  for (int64_t other = 0; other < static_cast<int64_t>(hosts.size()); ++other) {
    const auto status = stands(other);
    if (status.location.host == (mine.location.host + 1) % count && status.location.local_rank == mine.location.local_rank)
      return other;
  }
  return rank;
}

}  // namespace

Heartbeats::Heartbeats(int64_t rank, const std::vector<int64_t>& hosts) : watched_(next_of(rank, hosts)) {}

double Heartbeats::seconds_since_heartbeat(RankStateStore& store) {
  const auto now = Clock::now();
  const auto passed =
      looked_ == Clock::time_point{} ? 0.0 : std::chrono::duration<double>(now - looked_).count();
  looked_ = now;
  silent_ += std::min(passed, kMaxBetweenChecks);
  if (now - beaten_ < kBeat)
    return silent_;
  beaten_ = now;
  store.publish_heartbeat();
  auto beat = store.heartbeat_of(watched_);
  if (beat.empty() || beat != last_) {
    last_ = std::move(beat);
    silent_ = 0;
  }
  return silent_;
}

}  // namespace lightning_zero
