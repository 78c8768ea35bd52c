#include "weights/gather_log.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lightning_zero {

namespace {

// A bound on memory for loops that evaluate for long between two steps: a step of the largest models gathers
// some thousand times.
constexpr size_t kMostEntries = 1 << 16;
// Backwards of one step that are told apart. An entry takes some 64 bytes.
constexpr size_t kMostBackwards = 64;

}  // namespace

void GatherLog::begin_step() {
  now_.clear();
  ended_ = 0;
  notes_ = true;
}

void GatherLog::note(Entry entry) {
  notes_ = notes_ && now_.size() < kMostEntries;
  if (notes_)
    now_.push_back(std::move(entry));
}

GatherLog::Entries GatherLog::take_from(size_t begin) {
  const auto first = now_.begin() + static_cast<std::ptrdiff_t>(std::min(begin, now_.size()));
  Entries taken(std::make_move_iterator(first), std::make_move_iterator(now_.end()));
  now_.erase(first, now_.end());
  return taken;
}

void GatherLog::append(const Entries& entries) {
  for (const auto& entry : entries) note(entry);
}

void GatherLog::end_backward() {
  if (ended_ < kMostBackwards) {
    noted_.resize(std::max(noted_.size(), ended_ + 1));
    noted_[ended_] = notes_ ? std::move(now_) : Entries{};
  }
  end_without();
}

GatherLog::Entries GatherLog::missing() const {
  if (ended_ >= noted_.size() || !notes_)
    return {};
  const auto& all = noted_[ended_];
  if (now_.size() > all.size() || !std::equal(now_.begin(), now_.end(), all.begin()))
    return {};
  return {all.begin() + static_cast<std::ptrdiff_t>(now_.size()), all.end()};
}

void GatherLog::end_without() {
  now_.clear();
  ++ended_;
}

}  // namespace lightning_zero
