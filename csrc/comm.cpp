#include "comm.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <thread>

#include "compat.h"

namespace lightning_zero {

void Pending::wait(const c10::Device& device) {
  if (work_) {
    work_->wait();
    work_.reset();
  }
  fence_.block(current_stream(device));
  if (auto then = std::exchange(continuation_, {})) then();
}

bool Pending::ready() const { return !work_ || work_->isCompleted(); }

bool Pending::ready_within(std::chrono::milliseconds limit) const {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

Communicator::Communicator(const std::string& group_name, const c10::Device& device)
    : group_(c10d::resolve_process_group(group_name)), device_(device), stream_(new_stream(device)) {}

template <class Launch>
Pending Communicator::launch(Launch&& launch, std::function<void()> then) {
  Pending pending;
  if (!has_streams(device_)) {
    pending.work_ = launch(/*async=*/true);
    pending.continuation_ = std::move(then);
    if (synchronize_each) pending.wait(device_);
    return pending;
  }
  const auto caller = current_stream(device_);
  if (synchronize_each) synchronize(caller);
  Fence inputs_ready;
  inputs_ready.record(caller);
  {
    c10::StreamGuard on_our_stream(stream_);
    inputs_ready.block(stream_);
    // Not async: c10d then queues the collective on the current stream, ours. It may return no Work.
    if (auto work = launch(/*async=*/false)) work->wait();
    if (then) then();
    pending.fence_.record(stream_);
  }
  if (synchronize_each) synchronize(stream_);
  return pending;
}

Pending Communicator::all_gather(at::Tensor output, at::Tensor input, std::optional<at::ScalarType> cast_to) {
  return launch(
      [&](bool async) {
        c10d::AllgatherOptions options;
        options.asyncOp = async;
        // On an accelerator the cast copy comes from our stream's pool, so freeing it at once is in order.
        auto source = cast_to ? input.to(*cast_to) : input;
        return compat::all_gather(*group_, output, source, options, 0);
      },
      {});
}

Pending Communicator::reduce_scatter(
    at::Tensor output, at::Tensor input, c10d::ReduceOp::RedOpType op, std::function<void()> then) {
  return launch(
      [&](bool async) {
        c10d::ReduceScatterOptions options;
        options.asyncOp = async;
        options.reduceOp = op;
        return compat::reduce_scatter(*group_, output, input, options, 0);
      },
      std::move(then));
}

void Communicator::all_reduce_max(at::Tensor& values) {
  std::vector<at::Tensor> tensors{values};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group_->allreduce(tensors, options)->wait();
}

}  // namespace lightning_zero
