// Which gradients travel in which bucket, and in which order buckets leave.
#pragma once

#include <vector>

#include "context.h"
#include "gradients/bucket.h"

namespace lightning_zero {

class BucketLayout {
 public:
  struct Position {
    int64_t bucket = -1;
    int64_t slot = -1;
  };

  explicit BucketLayout(Context& context) : context_(context) {}

  // Parameters or options are others than they were: made again before the next backward.
  void add_parameter();
  void forget() { buckets_.clear(); }
  bool is_empty() const { return buckets_.empty(); }
  size_t size() const { return buckets_.size(); }
  bool is_stale() const;
  void make();
  // Changes each time.
  int64_t number() const { return made_; }

  // Launching in the order of arrival is what hides the reduce-scatters. The first backward shows the order;
  // it is adopted only when every rank saw the same one.
  void learn(const std::vector<int64_t>& arrivals, bool alike);
  bool is_learned() const { return learned_; }

  // Trainable parameters in the order their gradients are sent.
  const std::vector<int64_t>& order() const { return order_; }
  Position position(int64_t index) const { return position_[static_cast<size_t>(index)]; }
  // Launched in this order; and a second chance for each.
  std::vector<ReduceBucket>& buckets() { return buckets_; }
  std::vector<ReduceBucket>& late() { return late_; }
  ReduceBucket::Slot& slot(Position position) { return buckets_[position.bucket].slots()[position.slot]; }

  // Elements per rank that the buckets need, so that pools are neither larger than that nor grow.
  void expect(BufferPools& pools) const;
  // All buckets are empty again.
  void reset();
  void close();

  // Elements per rank that a bucket may have.
  int64_t row_limit(at::ScalarType dtype) const;

 private:
  at::ScalarType wire_dtype(const ParamRecord& record) const;

  Context& context_;
  std::vector<int64_t> order_;
  std::vector<int> expected_;       // arrivals per backward, by parameter
  std::vector<Position> position_;  // by parameter
  std::vector<ReduceBucket> buckets_, late_;
  bool learned_ = false;
  int64_t made_ = 0;
};

}  // namespace lightning_zero
