#include "weights/host_exchange.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "tensor_ops.h"

namespace lightning_zero {

namespace {

constexpr int kSmallParts = 3;  // of 1/8, 1/4 and 1/2 of the size: the first layers wait for less

// Describe parts for the watchdog's messages.
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

void HostExchange::begin(const std::vector<ShardCopy*>& copies, int64_t first) {
  std::vector<std::vector<ShardCopy*>> parts;
  int64_t room = 0;
  for (auto* copy : copies) {
    const auto bytes = static_cast<int64_t>(copy->local.nbytes()) * context_.intra_host.size;
    if (parts.empty() || bytes > room) {
      room = context_.options.exchange_part_bytes >>
             std::max<int64_t>(kSmallParts - static_cast<int64_t>(parts.size()), 0);
      parts.emplace_back();
    }
    room -= bytes;
    const auto before = std::exchange(copy->exchange_part, static_cast<int64_t>(parts.size()) - 1);
    layout_version_ += copy->use_order >= 0 && copy->exchange_part != before;
    parts.back().push_back(copy);
  }
  parts_.clear();
  received_ = 0;
  waited_ = {};
  first_ = first;
  planned_ = static_cast<int64_t>(parts.size());
  if (auto* remote_signals = comms_.remote_signals())
    remote_signals->begin(first);
  if (context_.watchdog)
    context_.watchdog->activity().set_exchange_parts(first, names_of(parts));
  announce_send();
  for (const auto& part : parts) {
    std::vector<at::Tensor> outputs, own;
    for (const auto* copy : part) {
      const auto numel = copy->local.numel() / context_.inter_host.size;
      outputs.push_back(copy->local);
      own.push_back(flat_range(copy->local, context_.inter_host.rank * numel, numel));
      context_.count("gather_bytes_across", static_cast<int64_t>(copy->local.nbytes()));
    }
    send(std::move(outputs), std::move(own));
  }
  context_.count("host_shard_refreshes");
  context_.count("exchanged_parts", planned_);
}

// Parts depend only on ranks with the same local rank, so one signal covers all of them.
void HostExchange::announce_send() {
  if (auto* remote_signals = comms_.remote_signals();
      remote_signals != nullptr && has_streams(context_.device))
    comms_.inter_host_gathers()->run([&] { remote_signals->announce_send(planned_ - 1); });
  else if (context_.watchdog)
    context_.watchdog->activity().set_sequence_number(SequenceId::PART_SENT, last());
}

void HostExchange::send(std::vector<at::Tensor> outputs, std::vector<at::Tensor> own) {
  auto& inter_host = *comms_.inter_host_gathers();
  // In place: the input is a slice of the output.
  auto pending = inter_host.all_gather_group(std::move(outputs), std::move(own));
  if (auto* remote_signals = comms_.remote_signals();
      remote_signals != nullptr && has_streams(context_.device))
    pending = inter_host.run([&] { remote_signals->announce(static_cast<int64_t>(parts_.size())); });
  parts_.push_back(std::move(pending));
}

void HostExchange::end() {
  if (parts_.empty())
    return;
  if (!has_streams(context_.device))
    return wait_for_part(static_cast<int64_t>(parts_.size()) - 1);
  auto last = parts_.back();
  last.wait(context_.device);
}

void HostExchange::wait_for_part(int64_t part) {
  for (; received_ <= part; ++received_) {
    auto& pending = parts_[static_cast<size_t>(received_)];
    std::optional<Watchdog::Waiting> waiting;
    if (context_.watchdog && !pending.ready())
      waiting.emplace(*context_.watchdog, SequenceId::PART, number_of(received_), "weights of other hosts");
    pending.wait(context_.device);
    waiting.reset();
    if (context_.watchdog)
      context_.watchdog->activity().set_sequence_number(SequenceId::PART, number_of(received_));
    if (auto* remote_signals = comms_.remote_signals())
      remote_signals->announce(received_);
    context_.count("awaited_parts");
  }
}

void HostExchange::wait_until_readable(const ShardCopy& copy, Reader reader, bool from_peers) {
  const auto part = copy.exchange_part;
  const bool in_graph = recording_ && has_streams(context_.device);
  auto* remote_signals = comms_.remote_signals();
  auto& seen = (in_graph ? recorded_ : waited_)[static_cast<size_t>(reader)];
  if (part < 0 || part >= static_cast<int64_t>(parts_.size()))
    return;
  if (!has_streams(context_.device)) {
    wait_for_part(part);
    if (recording_) {
      auto& noted = recorded_[static_cast<size_t>(reader)];
      noted = std::max(noted, part + 1);
    }
    if (!from_peers || seen > part)
      return;
    TORCH_INTERNAL_ASSERT(remote_signals, "remote signals are not set");
    remote_signals->wait_for(part, reader);
    seen = part + 1;
    return;
  }
  if (seen > part || (in_graph && !remote_signals))
    return;
  const auto wait = [&] {
    if (remote_signals != nullptr)
      return remote_signals->wait_for(part, reader);
    auto pending = parts_[static_cast<size_t>(part)];
    pending.wait(context_.device);
  };
  if (reader == Reader::GATHERS)
    comms_.gathers().run(wait);
  else
    wait();
  seen = part + 1;
}

void HostExchange::begin_recording() {
  recording_ = true;
  recorded_ = {};
}

HostExchange::Recorded HostExchange::end_recording() {
  recording_ = false;
  return {layout_version_, *std::max_element(recorded_.begin(), recorded_.end())};
}

// The graph waits for parts that hold other weights than at its capture, and there may be fewer of them.
void HostExchange::before_replay(const Recorded& graph) {
  auto* remote_signals = comms_.remote_signals();
  if (fits(graph) || remote_signals == nullptr || !has_streams(context_.device) || parts_.empty())
    return;
  remote_signals->wait_for(planned_ - 1, Reader::CURRENT);
  remote_signals->skip_waits(graph.parts);
}

bool HostShards::any() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [](const auto& record) {
    return record->compute_shard.local.defined() || record->full_precision_shard.local.defined();
  });
}

bool HostShards::any_stale() const {
  return std::any_of(context_.records.begin(), context_.records.end(), [&](const auto& record) {
    const auto now = record->stamp(context_.shard_version);
    const auto old = [&](const ShardCopy& copy) { return copy.local.defined() && copy.written != now; };
    return old(record->compute_shard) || old(record->full_precision_shard);
  });
}

bool HostShards::on_any_rank(bool yes) {
  const auto order = static_cast<int64_t>(order_ >> 2);
  std::vector<int64_t> votes{yes, order, -order, exchange_.last()};
  comms_.control()->all_reduce_max(votes, "the consensus on changed weights");
  if (votes[1] == -votes[2])
    agreed_ = used_.size();
  parts_ = votes[3];
  return votes[0] > 0;
}

ShardCopy& HostShards::read(ParamRecord& record, at::ScalarType dtype, bool compiled) {
  const bool own = record.shard.scalar_type() == dtype;
  auto& copy = own ? record.full_precision_shard : record.compute_shard;
  if (compiled && copy.use_order < 0) {
    copy.use_order = static_cast<int64_t>(used_.size());
    used_.push_back(&copy);
    order_ = (order_ ^ static_cast<uint64_t>(2 * record.index + own + 1)) * 0x100000001b3;  // FNV-1a
  }
  return copy;
}

void HostShards::refresh() {
  const auto agreed = static_cast<int64_t>(agreed_);
  std::vector<ShardCopy*> copies(used_.begin(), used_.begin() + agreed);
  std::vector<at::Tensor> own, shards;
  for (auto& record : context_.records) {
    for (auto* copy : {&record->compute_shard, &record->full_precision_shard}) {
      if (!copy->local.defined())
        continue;
      const auto numel = record->shard_numel();
      own.push_back(flat_range(copy->local, context_.inter_host.rank * numel, numel));
      shards.push_back(record->shard);
      copy->name = &record->name;
      copy->written = record->stamp(context_.shard_version);
      if (copy->use_order < 0 || copy->use_order >= agreed)
        copies.push_back(copy);
    }
  }
  tensors::copy_each(own, shards);
  exchange_.begin(copies, parts_);
}

}  // namespace lightning_zero
