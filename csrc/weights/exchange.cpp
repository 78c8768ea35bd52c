#include "weights/exchange.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace lightning_zero {

namespace {

constexpr int kSmallParts = 3;  // of an eighth, a quarter and a half: the first layers need not wait for more

// What whoever waits for a part is told that it holds.
std::vector<std::string> names_of(const std::vector<std::vector<ShardCopy*>>& parts) {
  std::vector<std::string> names;
  for (const auto& part : parts) {
    names.push_back("'" + *part.front()->name + "'");
    if (part.size() > 1)
      names.back() += " to '" + *part.back()->name + "', " + std::to_string(part.size()) + " weights";
  }
  return names;
}

}  // namespace

void Exchange::begin(const std::vector<ShardCopy*>& copies, int64_t first) {
  std::vector<std::vector<ShardCopy*>> parts;
  int64_t room = 0;
  for (auto* copy : copies) {
    const auto bytes = static_cast<int64_t>(copy->own.nbytes()) * context_.inside.size;
    if (parts.empty() || bytes > room) {
      room = context_.options.exchange_part_bytes >>
             std::max<int64_t>(kSmallParts - static_cast<int64_t>(parts.size()), 0);
      parts.emplace_back();
    }
    room -= bytes;
    const auto before = std::exchange(copy->part, static_cast<int64_t>(parts.size()) - 1);
    cut_ += copy->place >= 0 && copy->part != before;
    parts.back().push_back(copy);
  }
  parts_.clear();
  come_ = 0;
  seen_ = {};
  first_ = first;
  planned_ = static_cast<int64_t>(parts.size());
  if (auto* arrivals = comms_.arrivals())
    arrivals->begin(first);
  if (context_.watchdog)
    context_.watchdog->activity().set_exchange_parts(first, names_of(parts));
  tell_sending();
  for (const auto& part : parts) {
    std::vector<at::Tensor> whole, own;
    for (const auto* copy : part) {
      const auto numel = copy->own.numel() / context_.across.size;
      whole.push_back(copy->own);
      own.push_back(piece(copy->own, context_.across.rank * numel, numel));
      context_.count("gather_bytes_across", static_cast<int64_t>(copy->own.nbytes()));
    }
    send(std::move(whole), std::move(own));
  }
  context_.count("host_shard_refreshes");
  context_.count("exchanged_parts", planned_);
}

// Nothing keeps one part behind another but those at other places of the network, so this is said once.
void Exchange::tell_sending() {
  if (auto* arrivals = comms_.arrivals(); arrivals != nullptr && has_streams(context_.device))
    comms_.gathers_across()->run([&] { arrivals->send(planned_ - 1); });
  else if (context_.watchdog)
    context_.watchdog->activity().reach(SequenceId::PART_SENT, last());
}

void Exchange::send(std::vector<at::Tensor> whole, std::vector<at::Tensor> own) {
  auto& across = *comms_.gathers_across();
  // In place: what is gathered begins where it ends up.
  auto pending = across.all_gather_group(std::move(whole), std::move(own));
  if (auto* arrivals = comms_.arrivals(); arrivals != nullptr && has_streams(context_.device))
    pending = across.run([&] { arrivals->announce(static_cast<int64_t>(parts_.size())); });
  parts_.push_back(std::move(pending));
}

void Exchange::end() {
  if (parts_.empty())
    return;
  if (!has_streams(context_.device))
    return come(static_cast<int64_t>(parts_.size()) - 1);
  auto last = parts_.back();
  last.wait(context_.device);
}

void Exchange::come(int64_t part) {
  for (; come_ <= part; ++come_) {
    auto& pending = parts_[static_cast<size_t>(come_)];
    std::optional<Watchdog::Waiting> waiting;
    if (context_.watchdog && !pending.ready())
      waiting.emplace(*context_.watchdog, SequenceId::PART, number_of(come_), "weights of other hosts");
    pending.wait(context_.device);
    waiting.reset();
    if (context_.watchdog)
      context_.watchdog->activity().reach(SequenceId::PART, number_of(come_));
    if (auto* arrivals = comms_.arrivals())
      arrivals->announce(come_);
    context_.count("awaited_parts");
  }
}

void Exchange::let_read(const ShardCopy& copy, Reader reader, bool of_peers) {
  const auto part = copy.part;
  const bool in_graph = recording_ && has_streams(context_.device);
  auto* arrivals = comms_.arrivals();
  auto& seen = (in_graph ? recorded_ : seen_)[static_cast<size_t>(reader)];
  if (part < 0 || part >= static_cast<int64_t>(parts_.size()))
    return;
  if (!has_streams(context_.device)) {
    come(part);
    if (recording_) {
      auto& noted = recorded_[static_cast<size_t>(reader)];
      noted = std::max(noted, part + 1);
    }
    if (!of_peers || seen > part)
      return;
    TORCH_INTERNAL_ASSERT(arrivals, "nobody tells what peers have got");
    arrivals->wait_for(part, reader);
    seen = part + 1;
    return;
  }
  if (seen > part || (in_graph && !arrivals))
    return;
  const auto wait = [&] {
    if (arrivals != nullptr)
      return arrivals->wait_for(part, reader);
    auto pending = parts_[static_cast<size_t>(part)];
    pending.wait(context_.device);
  };
  if (reader == Reader::GATHERS)
    comms_.gathers().run(wait);
  else
    wait();
  seen = part + 1;
}

void Exchange::begin_recording() {
  recording_ = true;
  recorded_ = {};
}

Exchange::Recorded Exchange::end_recording() {
  recording_ = false;
  return {cut_, *std::max_element(recorded_.begin(), recorded_.end())};
}

// What it waits for holds other weights than when it was captured, and there may be fewer parts than that.
void Exchange::before_replay(const Recorded& graph) {
  auto* arrivals = comms_.arrivals();
  if (fits(graph) || arrivals == nullptr || !has_streams(context_.device) || parts_.empty())
    return;
  arrivals->wait_for(planned_ - 1, Reader::CURRENT);
  arrivals->wait_no_more(graph.parts);
}

}  // namespace lightning_zero
