#include "transport/communicators.h"

#include <ATen/core/Tensor.h>

#include "runtime/tensors.h"

namespace lightning_zero {

Communicators::Communicators(Context& context, const Names& names)
    : context_(context),
      gathers_(names.gathers, context.device, SequenceId::GATHER, order_),
      reduces_(names.reduces, context.device, SequenceId::REDUCE, order_) {
  context.intra_host = gathers_.ranks();
  context.rank = context.intra_host.rank;
  context.size = context.intra_host.size;
  if (!names.inter_host_reduces.empty()) {
    const auto inter_host = [&](const std::string& name, SequenceId sequence) {
      return std::make_unique<Communicator>(name, context.device, sequence, order_);
    };
    context.replicated = names.inter_host_gathers.empty();
    if (!context.replicated)
      inter_host_gathers_ = inter_host(names.inter_host_gathers, SequenceId::GATHER);
    inter_host_reduces_ = inter_host(names.inter_host_reduces, SequenceId::REDUCE);
    context.inter_host = inter_host_reduces_->ranks();
    context.size *= context.inter_host.size;
  }
  if (context.size == 1)
    return;
  control_.emplace(names.control, c10::Device(c10::kCPU), SequenceId::CONTROL, order_);
  context.rank = control_->ranks().rank;
  TORCH_INTERNAL_ASSERT(control_->ranks().size == context.size, "hosts have other numbers of ranks");
}

std::vector<Communicator*> Communicators::on_device() {
  std::vector<Communicator*> all{&gathers_, &reduces_};
  for (auto* comm : {inter_host_gathers_.get(), inter_host_reduces_.get()}) {
    if (comm != nullptr)
      all.push_back(comm);
  }
  return all;
}

void Communicators::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  for (auto* comm : on_device()) comm->watch(watchdog);
  if (control_)
    control_->watch(watchdog);
  if (remote_signals_)
    remote_signals_->watch(watchdog);
}

void Communicators::set_remote_signals(std::unique_ptr<RemoteSignals> remote_signals) {
  remote_signals_ = std::move(remote_signals);
  remote_signals_->watch(context_.watchdog);
}

void Communicators::configure(const ExecutorOptions& options) {
  for (auto* comm : on_device()) {
    comm->synchronize_each = options.sync_collectives;
    comm->set_nan_fill(options.nan_fill);
  }
}

void Communicators::emulate_link(const std::shared_ptr<EmulatedLink>& link) {
  for (auto* comm : {inter_host_gathers_.get(), inter_host_reduces_.get()}) {
    if (comm != nullptr)
      comm->link = link;
  }
}

void Communicators::block_current_stream() {
  for (auto* comm : on_device()) comm->block_current_stream();
}

void Communicators::begin_recording() {
  order_.begin_recording();
  for (auto* comm : on_device()) comm->set_recording(true);
}

void Communicators::join() {
  for (auto* comm : on_device()) comm->join();
}

void Communicators::join_ignoring_errors() {
  for (auto* comm : on_device()) {
    try {
      comm->join();  // or the capture could not even be ended
    } catch (const c10::Error&) {
      // It is lost already, by what could not be captured. Ending it is all that is left to do.
    }
  }
}

CollectiveCounts Communicators::end_recording() {
  const bool inter_host = inter_host_gathers_ && inter_host_gathers_->set_recording(false);
  for (auto* comm : on_device()) comm->set_recording(false);
  auto counts = order_.end_recording();
  counts.inter_host_gathers = inter_host;
  return counts;
}

void Communicators::before_replay(const CollectiveCounts& graph) {
  if (!graph.any())
    return;
  if (context_.watchdog)
    context_.watchdog->check();
  // Those of the graph come behind those that were launched before. Not behind what hosts exchange, of which
  // the graph waits for what it reads.
  for (auto* comm : on_device()) {
    if (comm != inter_host_gathers_.get() || graph.inter_host_gathers)
      comm->block_current_stream();
  }
  if (replays_.defined() || !context_.watchdog || context_.size == 1)
    return;
  replays_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).device(context_.device));
  replays_ended_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
}

void Communicators::after_replay(const CollectiveCounts& graph) {
  if (!graph.any() || !context_.watchdog)
    return;
  auto& activity = context_.watchdog->activity();
  const auto gathers = activity.advance(SequenceId::GATHER, graph.gathers);
  const auto reduces = activity.advance(SequenceId::REDUCE, graph.reduces);
  if (!replays_.defined())
    return;
  replays_.add_(1);
  replays_ended_.copy_(replays_, /*non_blocking=*/true);
  if (graph.reduces > 0)  // a backward, whose last meeting is a reduction
    activity.watch_replay(replays_ended_, SequenceId::REDUCE, reduces);
  else
    activity.watch_replay(replays_ended_, SequenceId::GATHER, gathers);
}

std::string Communicators::no_capture_reason() {
  for (auto* comm : on_device()) {
    if (auto reason = comm->no_capture_reason(); !reason.empty())
      return reason;
  }
  return {};
}

}  // namespace lightning_zero
