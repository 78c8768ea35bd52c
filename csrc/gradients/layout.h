// The assignment of gradients to buckets, and the division of a backward into segments.
//
// [Note: segments of a backward] A backward is divided where the backward of a compiled graph begins and ends
// (Reducer::mark). A segment is one graph, or the code between two graphs. No bucket belongs to two segments,
// so the gradients of a graph are sent with it and it can be replayed alone. A weight that several graphs use
// has a slot in the buckets of each; its second gradient is sent and added separately.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "context.h"
#include "gradients/bucket.h"

namespace lightning_zero {

// A parameter, and the number of its gradients before its bucket is launched.
struct Expected {
  int64_t index;
  int count;
  bool operator==(const Expected&) const = default;
};
// In the order of each parameter's last gradient.
using Segment = std::vector<Expected>;

class Segments {
 public:
  // Learn from the gradients of a backward. `marks`: number of arrivals at the end of each segment.
  // `same_on_all_ranks`: all ranks had the same arrivals. The first backward is adopted; later segments are
  // added up to a limit. Return true if the segments changed.
  bool learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks, bool same_on_all_ranks);
  bool is_learned() const { return learned_; }
  // Learn the next backward like the first one, because the parameters changed.
  void forget() { learned_ = false; }
  const std::vector<Segment>& all() const { return segments_; }

  // Return an id of the segment that ended last, for index_of().
  int64_t identify(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks);
  // Return the index of the segment in all(); -1 if it is not learned.
  int64_t index_of(int64_t number) const;

 private:
  // Return the index of each wanted segment among the known ones, in one order; their number for an unknown
  // one.
  std::vector<size_t> find(const std::vector<Segment>& wanted) const;
  bool add(std::vector<Segment> seen);
  // Return true if a backward of one segment produced all gradients of the only known segment, and more.
  bool is_superset(const std::vector<Segment>& seen) const;

  std::vector<Segment> segments_;
  struct Known {
    Segment segment;
    int before;  // equal segments earlier in the same backward, if a module is called twice
  };
  std::vector<Known> known_;
  // State of the last backward, which the next one usually repeats.
  std::vector<int64_t> arrivals_;
  std::vector<size_t> marks_;
  bool learned_ = false;
  int relearned_ = 0;
};

class BucketLayout {
 public:
  struct Position {
    int64_t bucket = -1;
    int64_t slot = -1;
    bool late = false;  // the bucket is already launched, and its late bucket is meant
  };

  explicit BucketLayout(Context& context) : context_(context) {}

  // Parameters or options changed; the next backward builds a new layout.
  void add_parameter();
  void forget() { buckets_.clear(); }
  size_t size() const { return buckets_.size(); }
  bool is_stale() const;
  void build();
  // Changes with each layout.
  int64_t version() const { return version_; }

  // Launching in the order of arrival overlaps reduce-scatters with backward. The order of the first backward
  // is adopted if all ranks saw the same one. `marks`: number of arrivals at the end of each segment. Later
  // segments are added up to a limit.
  void learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks, bool same_on_all_ranks);

  // Trainable parameters in the order in which their gradients are sent.
  const std::vector<int64_t>& order() const { return order_; }
  // In launch order; empty for a parameter that was not trainable.
  const std::vector<Position>& positions(int64_t index) const {
    return positions_[static_cast<size_t>(index)];
  }
  // Return the slot for a gradient that arrives now. `launched`: number of buckets that were launched, or
  // belong to an earlier graph.
  Position find_position(int64_t index, size_t launched);
  // Return true if an earlier bucket has sent a gradient of the parameter.
  bool was_launched(int64_t index, int64_t before) const;
  // Buckets in launch order, and their late buckets.
  std::vector<ReduceBucket>& buckets() { return buckets_; }
  std::vector<ReduceBucket>& late() { return late_; }
  ReduceBucket::Slot& slot(Position position) { return buckets_[position.bucket].slots()[position.slot]; }
  Segments& segments() { return learned_; }
  // Return the index of the segment's first bucket; 0 for segment -1.
  size_t first_bucket_of(int64_t segment) const;

  // Tell the pools the largest bucket, so that they need not grow.
  void expect(BufferPools& pools) const;
  // Reset all buckets to EMPTY.
  void reset();
  void close();

  // Return the maximum elements per rank of a bucket.
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
