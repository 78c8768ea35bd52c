#include "transport/transports.h"

#include <ATen/core/Tensor.h>

#include "runtime/device_turns.h"
#include "runtime/device_words.h"
#include "runtime/tensors.h"
#include "transport/peer_reduce.h"

namespace lightning_zero {

// Each is made in a file of its own, which says what it does: shard_copy.cpp, peer_copy.cpp, collective.cpp.
using MakeGather = std::unique_ptr<GatherTransport>(Context&, Communicators&, WeightMemory&);
MakeGather make_shard_copy_gather, make_peer_copy_gather, make_collective_gather;
std::unique_ptr<ReduceTransport> make_collective_reduce(const Context& context, Communicator& comm);
std::unique_ptr<ReduceTransport> make_across_reduce(Context& context, Communicator& comm,
                                                    std::unique_ptr<ReduceTransport> inside);

namespace {

// The best first; the last can gather everything.
constexpr MakeGather* kGathers[] = {make_shard_copy_gather, make_peer_copy_gather, make_collective_gather};

}  // namespace

Transports::Transports(Context& context, Communicators& communicators)
    : context_(context), communicators_(communicators) {
  reduce_by_collective();
}

std::vector<std::unique_ptr<GatherTransport>> Transports::make_gathers(WeightMemory& memory) {
  std::vector<std::unique_ptr<GatherTransport>> all;
  for (auto* make : kGathers) all.push_back(make(context_, communicators_, memory));
  return all;
}

void Transports::reduce_by_collective() {
  reduce_by(make_collective_reduce(context_, communicators_.reduces()));
}

void Transports::reduce_by(std::unique_ptr<ReduceTransport> inside) {
  auto* across = communicators_.reduces_across();
  reduce_ = across == nullptr ? std::move(inside) : make_across_reduce(context_, *across, std::move(inside));
}

void Transports::set_staging(std::vector<at::Tensor> staging, const std::string& group_name,
                             int64_t timeout_ms) {
  const auto mine = staging.at(static_cast<size_t>(context_.inside.rank));
  reduce_by(std::make_unique<PeerReduce>(context_, communicators_.reduces(), means_, std::move(staging)));
  if (!barrier_) {
    communicators_.reduces().use_symmetric_barrier(mine, group_name, timeout_ms, /*channel=*/0);
    communicators_.gathers().use_symmetric_barrier(mine, group_name, timeout_ms, /*channel=*/1);
  }
}

int64_t Transports::staging_unit() const {
  return PeerReduce::unit(context_.inside.size);
}

void Transports::set_barrier(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words) {
  Lock lock(context_.mutex);
  barrier_ = std::make_shared<DeviceBarrier>(code, std::move(rows), std::move(words), context_.inside.rank);
  communicators_.reduces().use_device_barrier(barrier_, 0);
  communicators_.gathers().use_device_barrier(barrier_, 1);
  if (context_.watchdog)
    context_.watchdog->activity().watch_device(barrier_->words());
}

void Transports::limit_cross_host_bandwidth(const std::optional<at::Tensor>& code, double bytes_per_s) {
  Lock lock(context_.mutex);
  communicators_.slow_down(bytes_per_s > 0 ? std::make_shared<SlowLink>(bytes_per_s, context_.device, code)
                                           : nullptr);
}

void Transports::set_mean_kernels(const at::Tensor& code) {
  Lock lock(context_.mutex);
  means_ = RowMeans(code, context_.inside.size);
}

std::unique_ptr<Turns> Transports::make_turns(std::vector<at::Tensor> numbers) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) == context_.inside.size);
  auto turns = std::make_unique<HostTurns>(std::move(numbers), context_.inside.rank);
  turns->watch(context_.watchdog);
  return turns;
}

std::unique_ptr<Turns> Transports::make_device_turns(const at::Tensor& code, std::vector<at::Tensor> rows) {
  TORCH_INTERNAL_ASSERT(barrier_ && static_cast<int64_t>(rows.size()) == context_.inside.size);
  ReadingStream readers{[this] { communicators_.gathers().catch_up(); },
                        [this](const std::function<void()>& work) { communicators_.gathers().run(work); }};
  return std::make_unique<DeviceTurns>(code, std::move(rows), barrier_->words(), context_.inside.rank,
                                       std::move(readers));
}

void Transports::set_remote_signals(std::vector<at::Tensor> numbers) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) == context_.inside.size);
  communicators_.take(std::make_unique<HostArrivals>(std::move(numbers), context_.inside.rank));
}

void Transports::set_device_remote_signals(const at::Tensor& code, std::vector<at::Tensor> rows) {
  Lock lock(context_.mutex);
  const bool alone = rows.size() == 1;
  TORCH_INTERNAL_ASSERT(alone || static_cast<int64_t>(rows.size()) == context_.inside.size);
  // Where there is no barrier, ranks read nothing of each other, and wait for their own collectives only.
  const auto pinned = at::TensorOptions().dtype(at::kInt).pinned_memory(true);
  auto words = barrier_ ? barrier_->words() : tensors::zeros(device_words::COUNT, pinned);
  communicators_.take(std::make_unique<DeviceArrivals>(code, std::move(rows), std::move(words),
                                                       alone ? 0 : context_.inside.rank));
}

void Transports::begin_stage() {
  Lock lock(context_.mutex);
  context_.read_order = 0;  // an exception may have ended the stage before, on each rank elsewhere
  auto* control = communicators_.control();
  if (control == nullptr)
    return;
  std::vector<int64_t> steps{steps_};
  control->all_reduce_max(steps, "the beginning of a stage");
  steps_ = steps[0];
}

void Transports::begin_step(bool in_backward) {
  if (!barrier_)
    return;
  const auto stream = current_stream(context_.device);
  communicators_.catch_up();
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

void Transports::close() {
  reduce_by_collective();
}

}  // namespace lightning_zero
