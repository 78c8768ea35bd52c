#include "transport/transports.h"

#include <ATen/ATen.h>

#include "runtime/device_turns.h"
#include "transport/collective.h"
#include "transport/peer_copy.h"
#include "transport/peer_reduce.h"
#include "transport/shard_copy.h"

namespace lightning_zero {

Transports::Transports(Context& context, const std::string& gather_group, const std::string& reduce_group,
                       const std::string& control_group)
    : context_(context),
      gathers_(gather_group, context.device, Lane::GATHER),
      reduces_(reduce_group, context.device, Lane::REDUCE) {
  context.rank = gathers_.rank();
  context.size = gathers_.size();
  if (context.size > 1)
    control_.emplace(control_group, c10::Device(c10::kCPU), Lane::CONTROL);
  reduce_by_collective();
}

std::vector<std::unique_ptr<GatherTransport>> Transports::make_gathers(WeightMemory& memory) {
  std::vector<std::unique_ptr<GatherTransport>> all;
  all.push_back(std::make_unique<ShardCopyGather>(context_, gathers_, memory));
  all.push_back(std::make_unique<PeerCopyGather>(context_, gathers_, memory));
  all.push_back(std::make_unique<CollectiveGather>(gathers_, memory));
  return all;
}

void Transports::reduce_by_collective() {
  reduce_ = std::make_unique<CollectiveReduce>(context_, reduces_);
}

void Transports::set_staging(std::vector<at::Tensor> staging, const std::string& group_name,
                             int64_t timeout_ms) {
  const auto mine = staging.at(static_cast<size_t>(context_.rank));
  reduce_ = std::make_unique<PeerReduce>(context_, reduces_, means_, std::move(staging));
  if (!barrier_) {
    reduces_.use_symmetric_barrier(mine, group_name, timeout_ms, /*channel=*/0);
    gathers_.use_symmetric_barrier(mine, group_name, timeout_ms, /*channel=*/1);
  }
}

int64_t Transports::staging_unit() const {
  return PeerReduce::unit(context_.size);
}

void Transports::set_barrier(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words) {
  Lock lock(context_.mutex);
  barrier_ = std::make_shared<DeviceBarrier>(code, std::move(rows), std::move(words), context_.rank);
  reduces_.use_device_barrier(barrier_, 0);
  gathers_.use_device_barrier(barrier_, 1);
  if (context_.watchdog)
    context_.watchdog->watch_device(barrier_->words());
}

void Transports::use_means(const at::Tensor& code) {
  Lock lock(context_.mutex);
  means_ = RowMeans(code, context_.size);
}

std::unique_ptr<Turns> Transports::make_turns(std::vector<at::Tensor> numbers) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) == context_.size);
  auto turns = std::make_unique<HostTurns>(std::move(numbers), context_.rank);
  turns->watch(context_.watchdog);
  return turns;
}

std::unique_ptr<Turns> Transports::make_device_turns(const at::Tensor& code, std::vector<at::Tensor> rows) {
  TORCH_INTERNAL_ASSERT(barrier_ && static_cast<int64_t>(rows.size()) == context_.size);
  ReadingStream readers{[this] { gathers_.catch_up(); },
                        [this](const std::function<void()>& work) { gathers_.run(work); }};
  return std::make_unique<DeviceTurns>(code, std::move(rows), barrier_->words(), context_.rank,
                                       std::move(readers));
}

void Transports::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  gathers_.watch(watchdog);
  reduces_.watch(watchdog);
  if (control_)
    control_->watch(watchdog);
}

void Transports::configure(const ExecutorOptions& options) {
  gathers_.synchronize_each = reduces_.synchronize_each = options.sync_collectives;
  gathers_.poison(options.poison);
  reduces_.poison(options.poison);
}

void Transports::begin_stage() {
  Lock lock(context_.mutex);
  if (!control_)
    return;
  auto steps = at::tensor({steps_}, at::kLong);
  control_->all_reduce_max(steps, "the beginning of a stage");
  steps_ = *steps.const_data_ptr<int64_t>();
}

void Transports::begin_step(bool in_backward) {
  if (!barrier_)
    return;
  const auto stream = current_stream(context_.device);
  gathers_.catch_up();
  reduces_.catch_up();
  if (std::exchange(interrupted_, false)) {
    synchronize(stream);  // all waits have been ended
    barrier_->let_pass(false);
  }
  barrier_->begin_epoch(steps_, stream);
  if (!in_backward)
    reduce_->forget_barriers();  // what an interrupted backward had missed, nobody waits for any more
}

void Transports::interrupt() {
  if (!barrier_)
    return;
  barrier_->let_pass(true);
  interrupted_ = true;
}

void Transports::begin_recording() {
  gathers_.record();
  reduces_.record();
}

void Transports::join() {
  gathers_.join();
  reduces_.join();
}

void Transports::join_whatever_happened() {
  for (auto* comm : {&gathers_, &reduces_}) {
    try {
      comm->join();  // or the capture could not even be ended
    } catch (const c10::Error&) {
      // It is lost already, by what could not be captured. Ending it is all that is left to do.
    }
  }
}

void Transports::end_recording() {
  gathers_.stop_recording();
  reduces_.stop_recording();
}

void Transports::close() {
  reduce_by_collective();
}

}  // namespace lightning_zero
