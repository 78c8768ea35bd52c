// The Executor's plan: which gradients travel in which bucket, in which order. See executor.h.
#include <algorithm>

#include "executor.h"

namespace lightning_zero {

namespace {

// Buckets that may be on their way before the caller's stream waits for the first: they hold no memory of
// their own.
constexpr int kPushesInFlight = 4;

}  // namespace

at::ScalarType Executor::wire_dtype(const ParamRecord& record) const {
  const auto own = record.shard.scalar_type();
  return options_.reduce_dtype && c10::isFloatingType(own) ? *options_.reduce_dtype : own;
}

BufferPool& Executor::pool(at::ScalarType dtype) {
  auto& pool = pools_[static_cast<int>(dtype)];
  if (!pool) {
    const auto row = options_.bucket_bytes / static_cast<int64_t>(c10::elementSize(dtype)) / size();
    pool = std::make_unique<BufferPool>(dtype, device_, static_cast<int>(size()), std::max<int64_t>(row, 1),
                                        !options_.double_buffer ? 1
                                        : staging_.empty()      ? 2
                                                                : kPushesInFlight);
  }
  return *pool;
}

bool Executor::plan_is_stale() const {
  if (buckets_.empty())
    return true;
  for (const auto& record : records_) {
    if (record->trainable() != (position_[record->index].bucket >= 0))
      return true;
  }
  return false;
}

void Executor::plan_buckets() {
  // Parameters that became trainable go to the end; until an order has been learned, and for a new set of
  // parameters, gradients are expected in the reverse order of registration.
  std::vector<char> known(records_.size(), 0);
  std::erase_if(order_, [&](int64_t i) { return !at(i).trainable(); });
  for (auto i : order_) known[i] = 1;
  const auto before = order_.size();
  for (auto it = records_.rbegin(); it != records_.rend(); ++it) {
    if (!known[(*it)->index] && (*it)->trainable())
      order_.push_back((*it)->index);
  }
  if (order_.size() != before)
    order_learned_ = false;
  buckets_.clear();
  position_.assign(records_.size(), Position{});
  struct Planned {
    at::ScalarType dtype;
    int64_t chunk = 0;
    std::vector<int64_t> members;
  };
  std::vector<Planned> planned;
  std::unordered_map<int, size_t> open;  // dtype -> bucket
  for (auto index : order_) {
    const auto& record = at(index);
    const auto dtype = wire_dtype(record);
    const auto limit = options_.bucket_bytes / static_cast<int64_t>(c10::elementSize(dtype)) / size();
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
        return std::tuple(at(i).shard.scalar_type(), at(i).shard.storage_offset(), i);
      };
      return place(a) < place(b);
    });
    buckets_.emplace_back(bucket.dtype, static_cast<int>(size()));
    for (auto index : bucket.members) {
      auto& slots = buckets_.back().slots();
      position_[index] = {static_cast<int64_t>(buckets_.size()) - 1, static_cast<int64_t>(slots.size())};
      buckets_.back().append(&at(index), expected_[index]);
    }
  }
  expect_buckets();
  late_ = buckets_;
  ++plans_made_;
  count("plans");
}

void Executor::expect_buckets() {
  std::map<at::ScalarType, int64_t> largest;
  for (const auto& bucket : buckets_)
    largest[bucket.dtype()] = std::max(largest[bucket.dtype()], bucket.chunk());
  for (auto [dtype, chunk] : largest) pool(dtype).expect(chunk);
}

// Launching in the order of arrival is what hides the reduce-scatters. The first backward shows the order; it
// is adopted only when every rank saw the same one.
void Executor::learn_order(const std::vector<int64_t>& agreed) {
  if (order_learned_ || arrivals_.empty())
    return;
  order_learned_ = true;
  if (agreed[order_.size()] != -agreed[order_.size() + 1])
    return;
  std::vector<int64_t> last(records_.size(), std::numeric_limits<int64_t>::max());
  std::fill(expected_.begin(), expected_.end(), 0);
  for (size_t i = 0; i < arrivals_.size(); ++i) {
    last[arrivals_[i]] = static_cast<int64_t>(i);
    ++expected_[arrivals_[i]];
  }
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return last[a] < last[b]; });
  for (auto& bucket : buckets_) bucket.reset();
  buckets_.clear();
}

}  // namespace lightning_zero
