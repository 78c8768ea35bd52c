#include "transport/communicators.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace lightning_zero {

Communicators::Communicators(Context& context, const std::string& gather_group,
                             const std::string& reduce_group, const std::string& control_group)
    : context_(context),
      gathers_(gather_group, context.device, Lane::GATHER, line_),
      reduces_(reduce_group, context.device, Lane::REDUCE, line_) {
  context.rank = gathers_.rank();
  context.size = gathers_.size();
  if (context.size > 1)
    control_.emplace(control_group, c10::Device(c10::kCPU), Lane::CONTROL, line_);
}

void Communicators::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  gathers_.watch(watchdog);
  reduces_.watch(watchdog);
  if (control_)
    control_->watch(watchdog);
}

void Communicators::configure(const ExecutorOptions& options) {
  gathers_.synchronize_each = reduces_.synchronize_each = options.sync_collectives;
  gathers_.poison(options.poison);
  reduces_.poison(options.poison);
}

void Communicators::catch_up() {
  gathers_.catch_up();
  reduces_.catch_up();
}

void Communicators::begin_recording() {
  line_.begin_recording();
  gathers_.record();
  reduces_.record();
}

void Communicators::join() {
  gathers_.join();
  reduces_.join();
}

void Communicators::join_whatever_happened() {
  for (auto* comm : {&gathers_, &reduces_}) {
    try {
      comm->join();  // or the capture could not even be ended
    } catch (const c10::Error&) {
      // It is lost already, by what could not be captured. Ending it is all that is left to do.
    }
  }
}

Meetings Communicators::end_recording() {
  gathers_.stop_recording();
  reduces_.stop_recording();
  return line_.end_recording();
}

void Communicators::before_replay(const Meetings& graph) {
  if (!graph.any())
    return;
  if (context_.watchdog)
    context_.watchdog->check();
  catch_up();  // those of the graph come behind those that were launched before
  if (replays_.defined() || !context_.watchdog || context_.size == 1)
    return;
  replays_ = at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(context_.device));
  replays_ended_ = at::zeros({1}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
}

void Communicators::after_replay(const Meetings& graph) {
  if (!graph.any() || !context_.watchdog)
    return;
  auto& activity = context_.watchdog->activity();
  const auto gathers = activity.meet(Lane::GATHER, graph.gathers);
  const auto reduces = activity.meet(Lane::REDUCE, graph.reduces);
  if (!replays_.defined())
    return;
  replays_.add_(1);
  replays_ended_.copy_(replays_, /*non_blocking=*/true);
  if (graph.reduces > 0)  // a backward, whose last meeting is a reduction
    activity.watch_replay(replays_ended_, Lane::REDUCE, reduces);
  else
    activity.watch_replay(replays_ended_, Lane::GATHER, gathers);
}

std::string Communicators::why_not_captured() const {
  const auto reason = gathers_.why_not_captured();
  return reason.empty() ? reduces_.why_not_captured() : reason;
}

}  // namespace lightning_zero
