#include "transport/transport.h"

#include <ATen/core/Tensor.h>

#include "sync/epoch_lock.h"
#include "sync/signal_pads.h"
#include "tensor_ops.h"

namespace lightning_zero {

// Defined in peer_copy.cpp, collective.cpp, single_rank.cpp, peer_reduce.cpp and cross_host.cpp.
using MakeGather = std::unique_ptr<GatherTransport>(Context&, Communicators&, WeightMemory&);
MakeGather make_shard_copy_gather, make_peer_copy_gather, make_collective_gather;
std::unique_ptr<ReduceTransport> make_collective_reduce(const Context& context, Communicator& comm);
std::unique_ptr<ReduceTransport> make_single_rank_reduce(const Context& context, Communicator& comm);
std::unique_ptr<ReduceTransport> make_peer_reduce(const Context& context, Communicator& comm,
                                                  const RowMeans& means, std::vector<at::Tensor> staging);
int64_t peer_reduce_unit(int64_t ranks);
std::unique_ptr<ReduceTransport> make_cross_host_reduce(Context& context, Communicator& comm,
                                                        std::unique_ptr<ReduceTransport> intra_host);

namespace {

// In order of preference; the last one can gather everything.
constexpr MakeGather* kGathers[] = {make_shard_copy_gather, make_peer_copy_gather, make_collective_gather};

}  // namespace

Transports::Transports(Context& context, Communicators& communicators)
    : context_(context), communicators_(communicators) {
  use_collective_reduce();
}

std::vector<std::unique_ptr<GatherTransport>> Transports::make_gathers(WeightMemory& memory) {
  std::vector<std::unique_ptr<GatherTransport>> all;
  for (auto* make : kGathers) all.push_back(make(context_, communicators_, memory));
  return all;
}

void Transports::use_collective_reduce() {
  auto* make = context_.size == 1 ? make_single_rank_reduce : make_collective_reduce;
  set_reduce(make(context_, communicators_.reduces()));
}

void Transports::set_reduce(std::unique_ptr<ReduceTransport> intra_host) {
  auto* inter_host = communicators_.inter_host_reduces();
  reduce_ = inter_host == nullptr ? std::move(intra_host)
                                  : make_cross_host_reduce(context_, *inter_host, std::move(intra_host));
}

void Transports::set_staging(std::vector<at::Tensor> staging, const std::string& group_name,
                             int64_t timeout_ms) {
  const auto mine = staging.at(static_cast<size_t>(context_.intra_host.rank));
  set_reduce(make_peer_reduce(context_, communicators_.reduces(), means_, std::move(staging)));
  if (!barrier_) {
    communicators_.reduces().use_symmetric_barrier(mine, group_name, timeout_ms, /*channel=*/0);
    communicators_.gathers().use_symmetric_barrier(mine, group_name, timeout_ms, /*channel=*/1);
  }
}

int64_t Transports::staging_unit() const {
  return peer_reduce_unit(context_.intra_host.size);
}

void Transports::set_barrier(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words) {
  Lock lock(context_.mutex);
  barrier_ =
      std::make_shared<DeviceBarrier>(code, std::move(pads), std::move(words), context_.intra_host.rank);
  communicators_.reduces().use_device_barrier(barrier_, 0);
  communicators_.gathers().use_device_barrier(barrier_, 1);
  if (context_.watchdog)
    context_.watchdog->activity().watch_device(barrier_->words());
}

void Transports::limit_cross_host_bandwidth(const std::optional<at::Tensor>& code, double bytes_per_s) {
  Lock lock(context_.mutex);
  communicators_.emulate_link(
      bytes_per_s > 0 ? std::make_shared<EmulatedLink>(bytes_per_s, context_.device, code) : nullptr);
}

void Transports::set_mean_kernels(const at::Tensor& code) {
  Lock lock(context_.mutex);
  means_ = RowMeans(code, context_.intra_host.size);
}

std::unique_ptr<EpochLock> Transports::make_epoch_lock(std::vector<at::Tensor> numbers) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) == context_.intra_host.size);
  auto epoch_lock = std::make_unique<HostEpochLock>(std::move(numbers), context_.intra_host.rank);
  epoch_lock->watch(context_.watchdog);
  return epoch_lock;
}

std::unique_ptr<EpochLock> Transports::make_device_epoch_lock(const at::Tensor& code,
                                                              std::vector<at::Tensor> pads) {
  TORCH_INTERNAL_ASSERT(barrier_ && static_cast<int64_t>(pads.size()) == context_.intra_host.size);
  ReaderStream readers{[this] { communicators_.gathers().block_current_stream(); },
                       [this](const std::function<void()>& work) { communicators_.gathers().run(work); }};
  return std::make_unique<DeviceEpochLock>(code, std::move(pads), barrier_->words(), context_.intra_host.rank,
                                           std::move(readers));
}

void Transports::set_remote_signals(std::vector<at::Tensor> numbers) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) == context_.intra_host.size);
  communicators_.set_remote_signals(
      std::make_unique<HostRemoteSignals>(std::move(numbers), context_.intra_host.rank));
}

void Transports::set_device_remote_signals(const at::Tensor& code, std::vector<at::Tensor> pads) {
  Lock lock(context_.mutex);
  const bool alone = pads.size() == 1;
  TORCH_INTERNAL_ASSERT(alone || static_cast<int64_t>(pads.size()) == context_.intra_host.size);
  // Without a barrier, ranks do not read each other's memory and wait for their own collectives only.
  const auto pinned = at::TensorOptions().dtype(at::kInt).pinned_memory(true);
  auto words = barrier_ ? barrier_->words() : tensors::zeros(device_words::COUNT, pinned);
  communicators_.set_remote_signals(std::make_unique<DeviceRemoteSignals>(
      code, std::move(pads), std::move(words), alone ? 0 : context_.intra_host.rank));
}

void Transports::begin_stage() {
  Lock lock(context_.mutex);
  context_.eager_read_hash = 0;  // an exception may have ended the previous stage at different points
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
  communicators_.block_current_stream();
  if (std::exchange(interrupted_, false)) {
    synchronize(stream);  // all waits have been ended
    barrier_->release_waits(false);
  }
  barrier_->begin_step(steps_, stream);
  if (!in_backward)
    reduce_->forget_barriers();  // no rank waits for barriers that an interrupted backward missed
}

void Transports::release_barriers() {
  if (!barrier_)
    return;
  barrier_->release_waits(true);
  interrupted_ = true;
}

void Transports::close() {
  use_collective_reduce();
}

}  // namespace lightning_zero
