// How a backward is cut into what can be sent, and replayed, by itself.
//
// [Note: segments of a backward] A backward is cut where a compiled graph's begins and ends (Reducer::mark):
// into segments, each of one graph, or of code between two. No bucket belongs to two of them, so the
// gradients of a graph leave with it, and it can be replayed alone. A weight that is used in several graphs
// has a place in each one's buckets: its second gradient is sent, and added, by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lightning_zero {

// A parameter, and how many of its gradients come before its bucket leaves.
struct Expected {
  int64_t index;
  int count;
  bool operator==(const Expected&) const = default;
};
// In the order in which the last of each one's gradients come.
using Segment = std::vector<Expected>;

class Segments {
 public:
  // What a backward has brought, and how much of it where a segment ended (`marks`); `alike`: on every rank.
  // The first one is learned as it is; segments that come later are added, a few times. Whether these are
  // others than before.
  bool learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks, bool same_on_all_ranks);
  bool is_learned() const { return learned_; }
  // The next backward is learned like the first one: there are other parameters.
  void forget() { learned_ = false; }
  const std::vector<Segment>& all() const { return segments_; }

  // A number by which to ask where() later: of the segment that ended last.
  int64_t identify(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks);
  // Which one it is of all(); -1 when it has not been learned.
  int64_t index_of(int64_t number) const;

 private:
  // Where each of these is among those that are known, in one order; their number for one that is not.
  std::vector<size_t> find(const std::vector<Segment>& wanted) const;
  bool add(std::vector<Segment> seen);
  // Whether a backward of one segment brought all of the only one that is known, and more.
  bool is_superset(const std::vector<Segment>& seen) const;

  std::vector<Segment> segments_;
  struct Known {
    Segment segment;
    int before;  // of the same parameters in the same backward, as where a module is called twice
  };
  std::vector<Known> known_;
  // Of the backward that was looked at last: usually the next one is like it.
  std::vector<int64_t> arrivals_;
  std::vector<size_t> marks_;
  bool learned_ = false;
  int relearned_ = 0;
};

}  // namespace lightning_zero
