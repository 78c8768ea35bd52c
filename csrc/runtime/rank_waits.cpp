#include "runtime/rank_waits.h"

#include <algorithm>
#include <map>

namespace lightning_zero {

namespace {

// Devices count with 32 bits, over and over; what hosts exchange is counted there, too.
bool is_behind(const RankStatus& status, SequenceId lane, int64_t number) {
  const auto sequence_number = status.sequence_number[static_cast<size_t>(lane)];
  if (!status.known || lane < SequenceId::DEVICE_REDUCE)
    return !status.known || sequence_number < number;
  return static_cast<int32_t>(static_cast<uint32_t>(sequence_number) - static_cast<uint32_t>(number)) < 0;
}

// Meetings of the ranks of one host.
bool is_of_host(SequenceId lane) {
  return lane == SequenceId::TURN || lane == SequenceId::DEVICE_REDUCE || lane == SequenceId::DEVICE_GATHER;
}

bool waits_for_part(const RankStatus& status) {
  return status.waits() && status.wait.lane == static_cast<int>(SequenceId::PART);
}

// A part comes to each rank of a host from those at the same place of the others. Of whatever has not come
// yet to all ranks of the host that waits: who has not sent it.
std::vector<int64_t> not_sent(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> missing;
  for (const auto& other : all) {
    const bool awaited = std::any_of(all.begin(), all.end(), [&](const RankStatus& peer) {
      return peer.at.host == waiting.at.host && peer.at.place == other.at.place &&
             is_behind(peer, SequenceId::PART, waiting.wait.number);
    });
    if (awaited && other.rank != waiting.rank && is_behind(other, SequenceId::PART_SENT, waiting.wait.number))
      missing.push_back(other.rank);
  }
  return missing;
}

// Ranks of the same host to which the part has not come.
std::vector<int64_t> not_come(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> ranks;
  for (const auto& other : all) {
    if (other.at.host == waiting.at.host && is_behind(other, SequenceId::PART, waiting.wait.number))
      ranks.push_back(other.rank);
  }
  return ranks;
}

// Ranks at whose end of a chain of waits this one is.
std::vector<int64_t> waiting_for(int64_t rank, const std::vector<RankStatus>& all) {
  std::vector<int64_t> ranks;
  for (const auto& other : all) {
    const auto ends = other.rank == rank ? std::vector<int64_t>() : culprits(other, all);
    if (std::find(ends.begin(), ends.end(), rank) != ends.end())
      ranks.push_back(other.rank);
  }
  return ranks;
}

// What to look at, where what hosts exchange does not come.
std::string about_part(const RankStatus& mine, const std::vector<int64_t>& missing,
                       const std::vector<RankStatus>& all) {
  if (missing.empty())
    return " Every rank has sent its part of that, and it has not come to " +
           named(not_come(mine, all), all) +
           ": the network between this host and others is slow, or broken. Try it with NCCL_DEBUG=INFO, and "
           "name the right interface by NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs).";
  return " These weights are read here once " + std::string(missing.size() == 1 ? "it has" : "they have") +
         " sent a part of them: look first at what was printed there, and at the host.";
}

}  // namespace

std::vector<int64_t> held_up_by(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  std::vector<int64_t> missing;
  if (!waiting.waits() || waiting.wait.lane < 0)
    return missing;
  if (waits_for_part(waiting))
    return not_sent(waiting, all);
  const auto lane = static_cast<SequenceId>(waiting.wait.lane);
  for (const auto& other : all) {
    const bool comes = other.rank != waiting.rank && !(is_of_host(lane) && other.at.host != waiting.at.host);
    if (comes && is_behind(other, lane, waiting.wait.number))
      missing.push_back(other.rank);
  }
  return missing;
}

std::vector<int64_t> culprits(const RankStatus& waiting, const std::vector<RankStatus>& all) {
  const auto direct = held_up_by(waiting, all);
  std::vector<int64_t> ends;
  std::vector<bool> seen(all.size());
  seen[static_cast<size_t>(waiting.rank)] = true;
  auto open = direct;
  while (!open.empty()) {
    const auto rank = static_cast<size_t>(open.back());
    open.pop_back();
    if (seen[rank])
      continue;
    seen[rank] = true;
    const auto& status = all[rank];
    const auto behind = status.known && !status.left && status.busy.empty() ? held_up_by(status, all)
                                                                            : std::vector<int64_t>();
    if (behind.empty())
      ends.push_back(status.rank);
    open.insert(open.end(), behind.begin(), behind.end());
  }
  std::sort(ends.begin(), ends.end());
  return ends.empty() ? direct : ends;
}

std::vector<int64_t> left_behind(const std::vector<RankStatus>& all) {
  const auto& first = all.front();
  // Of hosts: devices are all at the same place while they compute what all have launched. What hosts
  // exchange may be on its way.
  const bool together = first.waits() && first.wait.lane >= 0 && !waits_for_part(first) &&
                        std::all_of(all.begin(), all.end(), [&](const auto& status) {
                          return status.known && !status.left && status.waits() && !status.wait.on_device &&
                                 status.wait.lane == first.wait.lane &&
                                 status.wait.number == first.wait.number;
                        });
  std::vector<int64_t> missing;
  for (const auto lane : {static_cast<size_t>(SequenceId::GATHER), static_cast<size_t>(SequenceId::REDUCE)}) {
    if (!together || !missing.empty())
      break;
    int64_t most = 0;
    for (const auto& status : all) most = std::max(most, status.sequence_number[lane]);
    for (const auto& status : all) {
      if (status.sequence_number[lane] < most)
        missing.push_back(status.rank);
    }
  }
  return missing;
}

bool is_deadlock(const std::vector<RankStatus>& all) {
  if (!left_behind(all).empty())
    return std::all_of(all.begin(), all.end(), [](const RankStatus& status) { return status.busy.empty(); });
  bool any = false;
  for (const auto& status : all) {
    if (!status.known || !status.busy.empty())
      return false;
    if (status.left)
      continue;
    if (held_up_by(status, all).empty())
      return false;
    any = true;
  }
  return any;
}

bool is_still(const std::vector<RankStatus>& all) {
  return std::all_of(all.begin(), all.end(), [](const RankStatus& status) {
    return status.known && !status.left && status.busy.empty() && !status.moves() &&
           status.phase != Phase::OUTSIDE && !status.waits();
  });
}

std::string named(const std::vector<int64_t>& ranks, const std::vector<RankStatus>& all) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  std::map<int64_t, std::string> hosts;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    if (const auto& status = all[static_cast<size_t>(ranks[i])]; status.at.host >= 0)
      hosts[status.at.host] = status.at.host_name;
  }
  std::string of;
  for (const auto& [host, name] : hosts)
    of += (of.empty() ? "" : ", ") + std::to_string(host) + (name.empty() ? "" : " (" + name + ")");
  return of.empty() ? text : text + (hosts.size() == 1 ? " of host " : " of hosts ") + of;
}

std::string report(const std::vector<RankStatus>& all, int64_t rank, double now) {
  const auto& mine = all[static_cast<size_t>(rank)];
  const auto behind = left_behind(all);
  auto missing = behind.empty() ? culprits(mine, all) : behind;
  const bool on_its_way = waits_for_part(mine) && missing.empty();
  if (missing.empty() && !on_its_way) {
    for (const auto& other : all) {
      if (other.rank != rank && !other.waits())
        missing.push_back(other.rank);
    }
  }
  std::string text = mine.describe(now) + ".";
  if (mine.waits() && !missing.empty()) {
    text +=
        " Missing: " + named(missing, all) +
        (behind.empty() ? "." : ", which took no part in collectives that the devices of others wait for.");
  }
  if (waits_for_part(mine))
    text += about_part(mine, missing, all);
  if (const auto waiting = waiting_for(rank, all); !mine.waits() && !waiting.empty())
    text += " Waiting for this rank: " + named(waiting, all) + ".";
  std::string others;
  for (const auto& other : all) {
    if (other.rank != rank)
      others += (others.empty() ? " " : "; ") + other.describe(now);
  }
  return text + (others.empty() ? "" : " The others:" + others + ".");
}

}  // namespace lightning_zero
