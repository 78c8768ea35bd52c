#include "gradients/segments.h"

#include <algorithm>
#include <map>
#include <set>

namespace lightning_zero {

namespace {

// Where backwards are other ones all the time, that is not followed for ever.
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
    for (size_t i = end; i-- > begin;) {  // in the order of the last arrivals
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

// What was learned first may be a part: a first step's reentrant checkpoints run backwards of their own
// within its, and one of these ends first.
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

bool Segments::learn(const std::vector<int64_t>& arrivals, const std::vector<size_t>& marks, bool same_on_all_ranks) {
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
  // Without graphs that could be replayed, other buckets are of no use, unless most come late.
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
  // Branches of one graph bring some of its gradients, or others: whoever records it will see.
  return segments_.size() == 1 ? 0 : -1;
}

// Whether the backward that brought these segments is made room for: others, of graphs that did not run in
// it, stay where they are; those that share weights with what is new do not.
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
  // A backward of one segment may have brought another part of the same graph's gradients, as branches do.
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

}  // namespace lightning_zero
