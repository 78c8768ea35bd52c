#include "transport/communicators.h"

#include <ATen/core/Tensor.h>

#include "runtime/tensors.h"

namespace lightning_zero {

Communicators::Communicators(Context& context, const Names& names)
    : context_(context),
      gathers_(names.gathers, context.device, SequenceId::GATHER, line_),
      reduces_(names.reduces, context.device, SequenceId::REDUCE, line_) {
  context.inside = gathers_.ranks();
  context.rank = context.inside.rank;
  context.size = context.inside.size;
  if (!names.reduces_across.empty()) {
    const auto across = [&](const std::string& name, SequenceId lane) {
      return std::make_unique<Communicator>(name, context.device, lane, line_);
    };
    context.replicated = names.gathers_across.empty();
    if (!context.replicated)
      gathers_across_ = across(names.gathers_across, SequenceId::GATHER);
    reduces_across_ = across(names.reduces_across, SequenceId::REDUCE);
    context.across = reduces_across_->ranks();
    context.size *= context.across.size;
  }
  if (context.size == 1)
    return;
  control_.emplace(names.control, c10::Device(c10::kCPU), SequenceId::CONTROL, line_);
  context.rank = control_->ranks().rank;
  TORCH_INTERNAL_ASSERT(control_->ranks().size == context.size, "hosts have other numbers of ranks");
}

std::vector<Communicator*> Communicators::on_device() {
  std::vector<Communicator*> all{&gathers_, &reduces_};
  for (auto* comm : {gathers_across_.get(), reduces_across_.get()}) {
    if (comm != nullptr)
      all.push_back(comm);
  }
  return all;
}

void Communicators::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  for (auto* comm : on_device()) comm->watch(watchdog);
  if (control_)
    control_->watch(watchdog);
  if (arrivals_)
    arrivals_->watch(watchdog);
}

void Communicators::take(std::unique_ptr<Arrivals> arrivals) {
  arrivals_ = std::move(arrivals);
  arrivals_->watch(context_.watchdog);
}

void Communicators::configure(const ExecutorOptions& options) {
  for (auto* comm : on_device()) {
    comm->synchronize_each = options.sync_collectives;
    comm->poison(options.poison);
  }
}

void Communicators::slow_down(const std::shared_ptr<SlowLink>& link) {
  for (auto* comm : {gathers_across_.get(), reduces_across_.get()}) {
    if (comm != nullptr)
      comm->link = link;
  }
}

void Communicators::catch_up() {
  for (auto* comm : on_device()) comm->catch_up();
}

void Communicators::begin_recording() {
  line_.begin_recording();
  for (auto* comm : on_device()) comm->record(true);
}

void Communicators::join() {
  for (auto* comm : on_device()) comm->join();
}

void Communicators::join_whatever_happened() {
  for (auto* comm : on_device()) {
    try {
      comm->join();  // or the capture could not even be ended
    } catch (const c10::Error&) {
      // It is lost already, by what could not be captured. Ending it is all that is left to do.
    }
  }
}

Meetings Communicators::end_recording() {
  const bool across = gathers_across_ && gathers_across_->record(false);
  for (auto* comm : on_device()) comm->record(false);
  auto meetings = line_.end_recording();
  meetings.gathers_across = across;
  return meetings;
}

void Communicators::before_replay(const Meetings& graph) {
  if (!graph.any())
    return;
  if (context_.watchdog)
    context_.watchdog->check();
  // Those of the graph come behind those that were launched before. Not behind what hosts exchange, of which
  // the graph waits for what it reads.
  for (auto* comm : on_device()) {
    if (comm != gathers_across_.get() || graph.gathers_across)
      comm->catch_up();
  }
  if (replays_.defined() || !context_.watchdog || context_.size == 1)
    return;
  replays_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).device(context_.device));
  replays_ended_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
}

void Communicators::after_replay(const Meetings& graph) {
  if (!graph.any() || !context_.watchdog)
    return;
  auto& activity = context_.watchdog->activity();
  const auto gathers = activity.meet(SequenceId::GATHER, graph.gathers);
  const auto reduces = activity.meet(SequenceId::REDUCE, graph.reduces);
  if (!replays_.defined())
    return;
  replays_.add_(1);
  replays_ended_.copy_(replays_, /*non_blocking=*/true);
  if (graph.reduces > 0)  // a backward, whose last meeting is a reduction
    activity.watch_replay(replays_ended_, SequenceId::REDUCE, reduces);
  else
    activity.watch_replay(replays_ended_, SequenceId::GATHER, gathers);
}

std::string Communicators::why_not_captured() {
  for (auto* comm : on_device()) {
    if (auto reason = comm->why_not_captured(); !reason.empty())
      return reason;
  }
  return {};
}

}  // namespace lightning_zero
