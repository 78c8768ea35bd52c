#include "gradients/layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <unordered_map>

namespace lightning_zero {

at::ScalarType BucketLayout::wire_dtype(const ParamRecord& record) const {
  const auto own = record.shard.scalar_type();
  const auto& wanted = context_.options.reduce_dtype;
  return wanted && c10::isFloatingType(own) ? *wanted : own;
}

int64_t BucketLayout::row_limit(at::ScalarType dtype) const {
  return context_.options.bucket_bytes / static_cast<int64_t>(c10::elementSize(dtype)) / context_.size;
}

void BucketLayout::add_parameter() {
  expected_.push_back(1);
  position_.emplace_back();
  forget();
}

bool BucketLayout::is_stale() const {
  if (buckets_.empty())
    return true;
  return std::any_of(context_.records.begin(), context_.records.end(), [&](const auto& record) {
    return record->trainable() != (position_[record->index].bucket >= 0);
  });
}

void BucketLayout::make() {
  // Parameters that became trainable go to the end; until an order has been learned, and for a new set of
  // parameters, gradients are expected in the reverse order of registration.
  std::vector<char> known(context_.records.size(), 0);
  std::erase_if(order_, [&](int64_t i) { return !context_.at(i).trainable(); });
  for (auto i : order_) known[i] = 1;
  const auto before = order_.size();
  for (auto it = context_.records.rbegin(); it != context_.records.rend(); ++it) {
    if (!known[(*it)->index] && (*it)->trainable())
      order_.push_back((*it)->index);
  }
  if (order_.size() != before)
    learned_ = false;
  buckets_.clear();
  position_.assign(context_.records.size(), Position{});
  struct Planned {
    at::ScalarType dtype;
    int64_t chunk = 0;
    std::vector<int64_t> members;
  };
  std::vector<Planned> planned;
  std::unordered_map<int, size_t> open;  // dtype -> bucket
  for (auto index : order_) {
    const auto& record = context_.at(index);
    const auto dtype = wire_dtype(record);
    const auto limit = row_limit(dtype);
    auto found = open.find(static_cast<int>(dtype));
    if (found == open.end() || planned[found->second].chunk + record.shard_numel() > limit) {
      planned.push_back({dtype});
      found = open.insert_or_assign(static_cast<int>(dtype), planned.size() - 1).first;
    }
    auto& bucket = planned[found->second];
    bucket.members.push_back(index);
    bucket.chunk += record.shard_numel();
  }
  for (auto& bucket : planned) {
    // As in the arena: neighbours are accumulated by one kernel. Not by address, which no two ranks have in
    // common.
    std::stable_sort(bucket.members.begin(), bucket.members.end(), [&](int64_t a, int64_t b) {
      const auto place = [&](int64_t i) {
        return std::tuple(context_.at(i).shard.scalar_type(), context_.at(i).shard.storage_offset(), i);
      };
      return place(a) < place(b);
    });
    buckets_.emplace_back(bucket.dtype, static_cast<int>(context_.size));
    for (auto index : bucket.members) {
      auto& slots = buckets_.back().slots();
      position_[index] = {static_cast<int64_t>(buckets_.size()) - 1, static_cast<int64_t>(slots.size())};
      buckets_.back().append(&context_.at(index), expected_[index]);
    }
  }
  late_ = buckets_;
  ++made_;
  context_.count("plans");
}

void BucketLayout::expect(BufferPools& pools) const {
  std::map<at::ScalarType, int64_t> largest;
  for (const auto& bucket : buckets_)
    largest[bucket.dtype()] = std::max(largest[bucket.dtype()], bucket.chunk());
  for (auto [dtype, chunk] : largest) pools.of(dtype).expect(chunk);
}

void BucketLayout::learn(const std::vector<int64_t>& arrivals, bool alike) {
  if (learned_ || arrivals.empty())
    return;
  learned_ = true;
  if (!alike)
    return;
  std::vector<int64_t> last(context_.records.size(), std::numeric_limits<int64_t>::max());
  std::fill(expected_.begin(), expected_.end(), 0);
  for (size_t i = 0; i < arrivals.size(); ++i) {
    last[arrivals[i]] = static_cast<int64_t>(i);
    ++expected_[arrivals[i]];
  }
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return last[a] < last[b]; });
  for (auto& bucket : buckets_) bucket.reset();
  buckets_.clear();
}

void BucketLayout::reset() {
  for (auto& bucket : buckets_) bucket.reset();
  for (auto& bucket : late_) bucket.reset();
}

void BucketLayout::close() {
  buckets_.clear();
  late_.clear();
  order_.clear();
}

}  // namespace lightning_zero
