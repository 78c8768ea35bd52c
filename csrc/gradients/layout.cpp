#include "gradients/layout.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

namespace lightning_zero {

namespace {

// Limits for models whose backwards differ in every step.
constexpr int kMaxRelearned = 8;
constexpr size_t kMaxKnown = 1024;

std::vector<Segment> cut(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks) {
  std::vector<Segment> all;
  size_t begin = 0;
  const auto add = [&](size_t end) {
    if (end <= begin)
      return;
    auto& segment = all.emplace_back();
    std::map<int64_t, int> counts;
    for (size_t i = begin; i < end; ++i) ++counts[arrivals[i]];
    std::set<int64_t> seen;
    for (size_t i = end; i-- > begin;) {  // in the order of last arrivals
      if (seen.insert(arrivals[i]).second)
        segment.push_back({arrivals[i], counts[arrivals[i]]});
    }
    std::reverse(segment.begin(), segment.end());
    begin = end;
  };
  for (const auto mark : marks) add(std::min(mark, arrivals.size()));
  add(arrivals.size());
  return all;
}

bool are_same(Segment a, Segment b) {
  for (auto* segment : {&a, &b})
    std::sort(segment->begin(), segment->end(),
              [](const auto& x, const auto& y) { return x.index < y.index; });
  return a == b;
}

}  // namespace

// The first learned backward may be partial: reentrant checkpoints in a first step run backwards inside its
// backward, and one of these ends first.
bool Segments::is_superset(const std::vector<Segment>& seen) const {
  if (seen.size() != 1 || segments_.size() != 1 || seen.front().size() <= segments_.front().size())
    return false;
  std::set<int64_t> members;
  for (const auto& expected : seen.front()) members.insert(expected.index);
  return std::all_of(segments_.front().begin(), segments_.front().end(),
                     [&](const auto& expected) { return members.count(expected.index) > 0; });
}

std::vector<size_t> Segments::find(const std::vector<Segment>& wanted) const {
  std::vector<size_t> found;
  size_t from = 0;
  for (const auto& segment : wanted) {
    size_t at = from;
    while (at < segments_.size() && !are_same(segments_[at], segment)) ++at;
    found.push_back(at);
    if (at < segments_.size())
      from = at + 1;
  }
  return found;
}

bool Segments::learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks,
                     bool same_on_all_ranks) {
  if (arrivals.empty() || (learned_ && arrivals == arrivals_ && marks == marks_))
    return false;
  arrivals_ = arrivals;
  marks_ = marks;
  auto seen = cut(arrivals, marks);
  if (!learned_) {
    learned_ = true;
    if (same_on_all_ranks)
      segments_ = std::move(seen);
    return same_on_all_ranks;
  }
  // Without graphs to replay, other buckets are useful only if most gradients would arrive late.
  const bool useful = !marks.empty() || is_superset(seen);
  if (!same_on_all_ranks || !useful || relearned_ >= kMaxRelearned || !add(std::move(seen)))
    return false;
  ++relearned_;
  return true;
}

int64_t Segments::identify(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks) {
  const auto all = cut(arrivals, marks);
  if (all.empty())
    return -1;
  const auto& last = all.back();
  const auto before = static_cast<int>(
      std::count_if(all.begin(), all.end() - 1, [&](const auto& other) { return are_same(other, last); }));
  const auto found = std::find_if(known_.begin(), known_.end(), [&](const auto& known) {
    return known.before == before && are_same(known.segment, last);
  });
  const auto number = found - known_.begin();
  if (found == known_.end()) {
    if (known_.size() >= kMaxKnown)
      return -1;
    known_.push_back({last, before});
  }
  return number;
}

int64_t Segments::index_of(int64_t number) const {
  if (number < 0 || number >= static_cast<int64_t>(known_.size()))
    return -1;
  const auto& [wanted, before] = known_[number];
  int seen = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (are_same(segments_[i], wanted) && seen++ == before)
      return static_cast<int64_t>(i);
  }
  // Branches of one graph produce different gradients. The capture detects this.
  return segments_.size() == 1 ? 0 : -1;
}

// Try to make room for the segments of a backward. Segments of graphs that did not run in it stay. Those that
// share weights with new segments are removed.
bool Segments::add(std::vector<Segment> seen) {
  const auto found = find(seen);
  std::set<int64_t> members;  // of new segments
  for (size_t i = 0; i < seen.size(); ++i) {
    if (found[i] == segments_.size()) {
      for (const auto& expected : seen[i]) members.insert(expected.index);
    }
  }
  const auto overlaps = [&](const Segment& segment) {
    return std::any_of(segment.begin(), segment.end(),
                       [&](const auto& e) { return members.count(e.index) > 0; });
  };
  // A backward of one segment may contain another branch of the same graph.
  const bool other = seen.size() == 1 && std::any_of(segments_.begin(), segments_.end(), overlaps);
  if (members.empty() || (other && !is_superset(seen)))
    return false;
  std::vector<Segment> all;
  size_t copied = 0;
  const auto copy_before = [&](size_t end) {
    for (; copied < end; ++copied) {
      const bool is_seen = std::find(found.begin(), found.end(), copied) != found.end();
      if (is_seen || !overlaps(segments_[copied]))
        all.push_back(segments_[copied]);
    }
  };
  for (size_t i = 0; i < seen.size(); ++i) {
    if (found[i] < segments_.size()) {
      copy_before(found[i] + 1);
    } else {
      all.push_back(std::move(seen[i]));
    }
  }
  copy_before(segments_.size());
  segments_ = std::move(all);
  return true;
}

at::ScalarType BucketLayout::wire_dtype(const ParamRecord& record) const {
  const auto own = record.shard.scalar_type();
  const auto& wanted = context_.options.reduce_dtype;
  return wanted && c10::isFloatingType(own) ? *wanted : own;
}

int64_t BucketLayout::row_limit(at::ScalarType dtype) const {
  return context_.options.bucket_bytes / static_cast<int64_t>(c10::elementSize(dtype)) /
         context_.intra_host.size;
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
  // Parameters that became trainable are appended. Until an order is learned, and for a new set of
  // parameters, gradients are expected in reverse order of registration.
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
    if (!placed[index])  // parameters without gradients in the learned backward are not waited for
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
    // In the order of the flat buffer, so that one kernel accumulates adjacent slots. Not by address, which
    // differs between ranks.
    std::stable_sort(bucket.members.begin(), bucket.members.end(), [&](const auto& a, const auto& b) {
      const auto position = [&](int64_t i) {
        return std::tuple(context_.at(i).shard.scalar_type(), context_.at(i).shard.storage_offset(), i);
      };
      return position(a.index) < position(b.index);
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

void BucketLayout::learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks,
                         bool same_on_all_ranks) {
  if (!learned_.learn(arrivals, marks, same_on_all_ranks))
    return;
  sort_order();
  for (auto& bucket : buckets_) bucket.reset();
  buckets_.clear();
}

// Sort by the last gradient of each parameter. Parameters without gradients come last.
void BucketLayout::sort_order() {
  std::map<int64_t, size_t> last;
  size_t position = 0;
  for (const auto& segment : learned_.all()) {
    for (const auto& expected : segment) last[expected.index] = position++;
  }
  const auto rank = [&](int64_t i) { return last.count(i) ? last.at(i) : position; };
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
