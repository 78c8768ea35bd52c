#include "weights/gather_log.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lightning_zero {

namespace {

// A bound on memory for loops that evaluate for long between two steps: a step of the largest models gathers
// some thousand times.
constexpr size_t kMaxEntries = 1 << 16;
// Backwards of one step that are told apart. An entry takes some 64 bytes.
constexpr size_t kMaxBackwards = 64;

}  // namespace

void GatherLog::begin_step() {
  current_.clear();
  backwards_ = 0;
  logging_ = true;
}

void GatherLog::note(Entry entry) {
  logging_ = logging_ && current_.size() < kMaxEntries;
  if (logging_)
    current_.push_back(std::move(entry));
}

GatherLog::Entries GatherLog::take_from(size_t begin) {
  const auto first = current_.begin() + static_cast<std::ptrdiff_t>(std::min(begin, current_.size()));
  Entries taken(std::make_move_iterator(first), std::make_move_iterator(current_.end()));
  current_.erase(first, current_.end());
  return taken;
}

void GatherLog::append(const Entries& entries) {
  for (const auto& entry : entries) note(entry);
}

void GatherLog::end_backward() {
  if (backwards_ < kMaxBackwards) {
    previous_.resize(std::max(previous_.size(), backwards_ + 1));
    previous_[backwards_] = logging_ ? std::move(current_) : Entries{};
  }
  end_skipped();
}

GatherLog::Entries GatherLog::missing() const {
  if (backwards_ >= previous_.size() || !logging_)
    return {};
  const auto& all = previous_[backwards_];
  if (current_.size() > all.size() || !std::equal(current_.begin(), current_.end(), all.begin()))
    return {};
  return {all.begin() + static_cast<std::ptrdiff_t>(current_.size()), all.end()};
}

void GatherLog::end_skipped() {
  current_.clear();
  ++backwards_;
}

}  // namespace lightning_zero
