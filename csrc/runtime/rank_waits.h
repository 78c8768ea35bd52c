// Which ranks wait for which others, and what follows when all are put side by side. Pure, as rank_status.h.
#pragma once

#include <string>
#include <vector>

#include "runtime/rank_status.h"

namespace lightning_zero {

// The ranks for which this one waits: those that have not come to its meeting. Empty: all have, or it cannot
// be told.
std::vector<int64_t> find_awaited_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all);

// The ranks at the ends of that: those for which the ones it waits for wait in turn, and so on, but for those
// that wait for others themselves. Where each waits for another: the ones it waits for.
std::vector<int64_t> find_blocking_ranks(const RankStatus& waiting, const std::vector<RankStatus>& all);

// The ranks that began fewer collectives than others, although all wait at the same place: devices wait for
// those that never come, and hosts for their devices. Empty: there are none, or it cannot be told.
std::vector<int64_t> find_lagging_ranks(const std::vector<RankStatus>& all);

// Whether no rank can ever go on: each waits for one that does not come, or has left.
bool is_deadlock(const std::vector<RankStatus>& all);

// Whether every rank should be doing something, and none waits where that is seen.
bool is_idle(const std::vector<RankStatus>& all);

// Who is missing, where it was last, and where the others wait.
std::string format_report(const std::vector<RankStatus>& all, int64_t rank, double now);

// "rank 1", "ranks 1, 2 of host 0 (node17)"
std::string format_ranks(const std::vector<int64_t>& ranks, const std::vector<RankStatus>& all);

}  // namespace lightning_zero
