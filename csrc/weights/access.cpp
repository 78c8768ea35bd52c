#include "weights/access.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <utility>

namespace lightning_zero {

void Access::take(std::unique_ptr<Turns> turns) {
  TORCH_INTERNAL_ASSERT(!turns_);
  turns_ = std::move(turns);
}

void Access::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  if (turns_)
    turns_->watch(watchdog);
}

at::Tensor Access::source_in(ParamRecord& record, at::ScalarType dtype) {
  if (host_shards_ != nullptr) {
    const auto& copy = record.shard.scalar_type() == dtype ? record.full_precision_copy : record.compute_copy;
    const bool serves = published_ && copy.own.defined() && copy.own.scalar_type() == dtype;
    return serves ? copy.own : at::Tensor();
  }
  if (record.shard.scalar_type() == dtype)
    return record.shard;
  const auto& copy = record.compute_copy;
  if (!copy.own.defined() || copy.own.scalar_type() != dtype)
    return {};
  if (copies_.is_stale(record)) {
    if (!copy.of_ranks.empty())
      return {};  // a peer may be reading it
    copies_.write(record);
  }
  return copy.holds == InCopy::WEIGHT ? copy.own : at::Tensor();
}

void Access::begin_turn_to_write() {
  if (turns_->writing())
    return;
  ++context_.epoch;
  published_ = false;
  before_change_();
  turns_->begin_writing();
}

void Access::end_writing() {
  if (!turns_ || !turns_->writing())
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  copies_.write_all();
  turns_->end_writing();
}

void Access::begin_reading() {
  end_writing();
  turns_->wait_to_read();
  published_ = true;
}

void Access::begin_step(int64_t step) {
  if (!turns_)
    return;
  end_writing();
  turns_->begin_step(step);
}

void Access::expire() {
  if (turns_)
    return;
  ++context_.epoch;
  published_ = false;
  before_change_();
}

void Access::expire_unless_told() {
  if (host_shards_ == nullptr)
    expire();
}

void Access::close() {
  turns_.reset();
  if (host_shards_ != nullptr)
    host_shards_->exchange().close();
}

void Access::let_read(bool everything, bool wait) {
  if (!turns_)
    return publish(everything, wait);
  begin_reading();
  if (wait)
    comm_.catch_up();
}

void Access::let_read_ahead() {
  let_read(/*everything=*/false, /*wait=*/true);
  asked_ahead_ = host_shards_ != nullptr && host_shards_->any();
}

void Access::await_copy(ParamRecord& record, at::ScalarType dtype, bool of_peers) {
  if (host_shards_ != nullptr)
    host_shards_->exchange().let_read(host_shards_->read(record, dtype, /*compiled=*/true), Reader::GATHERS,
                                      of_peers);
}

void Access::await_resident(ParamRecord& record, bool compiled) {
  const auto dtype = record.resident.memory.scalar_type();
  host_shards_->exchange().let_read(host_shards_->read(record, dtype, compiled), Reader::CURRENT,
                                    /*of_peers=*/false);
}

void Access::publish_host_shards(bool wait) {
  if (!host_shards_->any())
    return;  // nobody reads any, and a rank that runs what this one replays would not ask
  const bool stale = !published_ || host_shards_->any_stale();
  if (std::exchange(asked_ahead_, false) && !stale)
    return;
  auto& exchange = host_shards_->exchange();
  if (host_shards_->on_any_rank(stale)) {
    before_change_();
    exchange.end();
    comm_.barrier().wait(context_.device);  // all have read
    host_shards_->refresh();
  }
  if (wait)
    comm_.catch_up();
  if (wait && !exchange.in_graphs())
    exchange.end();
  published_ = true;
}

void Access::publish(bool everything, bool wait) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (host_shards_ != nullptr)
    return publish_host_shards(wait);  // what changes shards says so
  const auto stale = copies_.stale(everything);
  if (!stale.empty())
    before_change_();
  // Whether this rank has anything to write is its own affair: all ranks come to the barrier whenever one
  // might.
  if (shared_) {
    auto all_have_read = comm_.barrier();
    if (!stale.empty() || !has_streams(context_.device))
      all_have_read.wait(context_.device);
  }
  if (everything) {
    copies_.write_all();
  } else {
    for (auto* record : stale) copies_.write(*record);
  }
  if (!shared_)
    return;
  copies_.write_full_precision(stale);
  auto all_have_written = comm_.barrier();
  if (wait || !has_streams(context_.device))
    all_have_written.wait(context_.device);
  published_ = true;
}

}  // namespace lightning_zero
