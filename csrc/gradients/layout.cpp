#include "gradients/layout.h"

#include <algorithm>
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
  return context_.options.bucket_bytes / static_cast<int64_t>(c10::elementSize(dtype)) / context_.intra_host.size;
}

void BucketLayout::add_parameter() {
  positions_.emplace_back();
  forget();
}

bool BucketLayout::is_stale() const {
  if (buckets_.empty())
    return true;
  return std::any_of(context_.records.begin(), context_.records.end(), [&](const auto& record) {
    return record->trainable() == positions_[record->index].empty();
  });
}

void BucketLayout::build() {
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
    learned_.forget();
  buckets_.clear();
  positions_.assign(context_.records.size(), {});
  int64_t number = 0;
  for (const auto& segment : members()) pack(segment, number++);
  late_ = buckets_;
  ++version_;
  context_.count("plans");
}

std::vector<Segment> BucketLayout::members() const {
  std::vector<Segment> all;
  std::vector<char> placed(context_.records.size(), 0);
  for (const auto& learned : learned_.all()) {
    auto& segment = all.emplace_back();
    for (const auto& expected : learned) {
      if (context_.at(expected.index).trainable()) {
        segment.push_back(expected);
        placed[expected.index] = 1;
      }
    }
  }
  if (all.empty())
    all.emplace_back();
  for (auto index : order_) {
    if (!placed[index])  // nobody waits for what did not come in the backward that was learned
      all.back().push_back({index, learned_.is_learned() ? 0 : 1});
  }
  return all;
}

void BucketLayout::pack(const Segment& members, int64_t segment) {
  struct Planned {
    at::ScalarType dtype;
    int64_t chunk = 0;
    std::vector<Expected> members;
  };
  std::vector<Planned> planned;
  std::unordered_map<int, size_t> open;  // dtype -> bucket
  for (const auto& member : members) {
    const auto& record = context_.at(member.index);
    const auto dtype = wire_dtype(record);
    const auto limit = row_limit(dtype);
    auto found = open.find(static_cast<int>(dtype));
    if (found == open.end() || planned[found->second].chunk + record.host_shard_numel() > limit) {
      planned.push_back({dtype});
      found = open.insert_or_assign(static_cast<int>(dtype), planned.size() - 1).first;
    }
    auto& bucket = planned[found->second];
    bucket.members.push_back(member);
    bucket.chunk += record.host_shard_numel();
  }
  for (auto& bucket : planned) {
    // As in the arena: neighbours are accumulated by one kernel. Not by address, which no two ranks have in
    // common.
    std::stable_sort(bucket.members.begin(), bucket.members.end(), [&](const auto& a, const auto& b) {
      const auto place = [&](int64_t i) {
        return std::tuple(context_.at(i).shard.scalar_type(), context_.at(i).shard.storage_offset(), i);
      };
      return place(a.index) < place(b.index);
    });
    auto& made = buckets_.emplace_back(bucket.dtype, context_.intra_host, context_.inter_host, segment);
    for (const auto& [index, count] : bucket.members) {
      positions_[index].push_back(
          {static_cast<int64_t>(buckets_.size()) - 1, static_cast<int64_t>(made.slots().size())});
      made.append(&context_.at(index), count, /*repeated=*/positions_[index].size() > 1);
    }
  }
}

BucketLayout::Position BucketLayout::find_position(int64_t index, size_t launched) {
  Position found;
  for (const auto position : positions_[static_cast<size_t>(index)]) {
    found = position;
    found.late = position.bucket < static_cast<int64_t>(launched) ||
                 buckets_[position.bucket].state() == ReduceBucket::State::LAUNCHED;
    const auto& slot = this->slot(position);
    if (!found.late && slot.arrivals < slot.expected)
      break;
  }
  return found;
}

bool BucketLayout::was_launched(int64_t index, int64_t before) const {
  const auto& all = positions_[static_cast<size_t>(index)];
  return std::any_of(all.begin(), all.end(), [&](const auto& position) {
    return position.bucket < before && buckets_[position.bucket].state() == ReduceBucket::State::LAUNCHED;
  });
}

size_t BucketLayout::first_bucket_of(int64_t segment) const {
  const auto first = std::find_if(buckets_.begin(), buckets_.end(),
                                  [&](const auto& bucket) { return bucket.segment() >= segment; });
  return static_cast<size_t>(first - buckets_.begin());
}

void BucketLayout::expect(BufferPools& pools) const {
  std::map<at::ScalarType, int64_t> largest;
  for (const auto& bucket : buckets_)
    largest[bucket.dtype()] = std::max(largest[bucket.dtype()], bucket.chunk());
  for (auto [dtype, chunk] : largest) pools.for_dtype(dtype).expect(chunk);
}

void BucketLayout::learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks, bool same_on_all_ranks) {
  if (!learned_.learn(arrivals, marks, same_on_all_ranks))
    return;
  sort_order();
  for (auto& bucket : buckets_) bucket.reset();
  buckets_.clear();
}

// By what brings each parameter's last gradient; those that nothing brings stay behind the others.
void BucketLayout::sort_order() {
  std::map<int64_t, size_t> last;
  size_t place = 0;
  for (const auto& segment : learned_.all()) {
    for (const auto& expected : segment) last[expected.index] = place++;
  }
  const auto rank = [&](int64_t i) { return last.count(i) ? last.at(i) : place; };
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return rank(a) < rank(b); });
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
