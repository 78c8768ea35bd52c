// Which gradients travel in which bucket, and in which order buckets leave.
#pragma once

#include <vector>

#include "context.h"
#include "gradients/bucket.h"
#include "gradients/segments.h"

namespace lightning_zero {

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
