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

#include "context.h"
#include "gradients/bucket.h"

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

// Which gradients travel in which bucket, and in which order buckets leave.

class BucketLayout {
 public:
  struct Position {
    int64_t bucket = -1;
    int64_t slot = -1;
    bool late = false;  // the bucket has left: its second chance is meant
  };

  explicit BucketLayout(Context& context) : context_(context) {}

  // Parameters or options are others than they were: made again before the next backward.
  void add_parameter();
  void forget() { buckets_.clear(); }
  size_t size() const { return buckets_.size(); }
  bool is_stale() const;
  void build();
  // Changes each time.
  int64_t version() const { return version_; }

  // Launching in the order of arrival is what hides the reduce-scatters. The first backward shows the order;
  // it is adopted only when every rank saw the same one. `marks`: how many had arrived where a segment ended.
  // Segments that come later are added, a few times.
  void learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks, bool same_on_all_ranks);

  // Trainable parameters in the order their gradients are sent.
  const std::vector<int64_t>& order() const { return order_; }
  // In the order in which they leave; empty for a parameter that was not trainable.
  const std::vector<Position>& positions(int64_t index) const {
    return positions_[static_cast<size_t>(index)];
  }
  // Where a gradient that arrives now goes. `launched`: so many buckets have left, or are another graph's.
  Position find_position(int64_t index, size_t launched);
  // Whether an earlier bucket than this one has brought the parameter's gradient.
  bool was_launched(int64_t index, int64_t before) const;
  // Launched in this order; and a second chance for each.
  std::vector<ReduceBucket>& buckets() { return buckets_; }
  std::vector<ReduceBucket>& late() { return late_; }
  ReduceBucket::Slot& slot(Position position) { return buckets_[position.bucket].slots()[position.slot]; }
  Segments& segments() { return learned_; }
  // Number of the first bucket of a segment, by its own number; 0 where that is -1.
  size_t first_bucket_of(int64_t segment) const;

  // Elements per rank that the buckets need, so that pools are neither larger than that nor grow.
  void expect(BufferPools& pools) const;
  // All buckets are empty again.
  void reset();
  void close();

  // Elements per rank that a bucket may have.
  int64_t row_limit(at::ScalarType dtype) const;

 private:
  at::ScalarType wire_dtype(const ParamRecord& record) const;
  void sort_order();
  std::vector<Segment> members() const;  // all trainable parameters, by segment
  void pack(const Segment& members, int64_t segment);

  Context& context_;
  std::vector<int64_t> order_;
  Segments learned_;
  std::vector<std::vector<Position>> positions_;  // by parameter
  std::vector<ReduceBucket> buckets_, late_;
  int64_t version_ = 0;
};

}  // namespace lightning_zero
