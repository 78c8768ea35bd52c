#include "gradients/recording.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "runtime/compat.h"

namespace lightning_zero {

namespace {

// In place of autograd's task while a backward is recorded.
constexpr int kRecording = -1;

}  // namespace

std::string GradientRecording::why_not() const {
  const auto& layout = reducer_.layout();
  if (layout.is_empty() || !layout.is_learned() || layout.is_stale())
    return "no backward pass has shown in which order gradients come";
  for (const auto index : layout.order()) {
    if (!context_.at(index).grad.defined())
      return "gradients have no memory yet";
  }
  return {};
}

void GradientRecording::begin(bool backward, bool adding) {
  // Nothing that was launched before may be waited for inside, and nothing inside from without.
  reducer_.release_buffers();
  reducer_.renew_pools();
  auto& now = reducer_.backward();
  recorded_ = {};
  recorded_.adding = adding;
  recorded_.layout = reducer_.layout().number();
  for (const auto i : reducer_.layout().order())
    recorded_.grads.push_back(context_.at(i).grad.const_data_ptr());
  around_.tasks = std::exchange(now.tasks, {});
  if (backward) {
    TORCH_INTERNAL_ASSERT(now.next_launch == 0);
    now.tasks = {kRecording};
    around_.arrivals = std::exchange(now.arrivals, {});
  }
  now.recorded_adding = adding;
  transports_.reduce().begin_recording(backward);
}

std::string GradientRecording::finish() {
  auto& layout = reducer_.layout();
  if (reducer_.in_backward()) {
    reducer_.launch_complete();  // a CPU launches nothing while gradients arrive
    reducer_.pools().drain();
  }
  const auto waits = [](const auto& bucket) { return bucket.state() == ReduceBucket::State::FILLING; };
  if (std::any_of(layout.buckets().begin(), layout.buckets().end(), waits) ||
      std::any_of(layout.late().begin(), layout.late().end(), waits))
    return "some of its gradients travel together with those of other graphs";
  return {};
}

GradientRecording::Recorded GradientRecording::end() {
  const auto& now = reducer_.backward();
  if (reducer_.in_backward())
    recorded_.arrivals = now.arrivals;
  recorded_.launched = now.next_launch;
  recorded_.traffic = transports_.reduce().end_recording();
  restore();
  return std::move(recorded_);
}

void GradientRecording::abort() {
  transports_.reduce().abort_recording();
  restore();
}

void GradientRecording::restore() {
  reducer_.layout().reset();
  // Their fences belong to the graph, and so does their memory.
  reducer_.renew_pools();
  auto& now = reducer_.backward();
  if (reducer_.in_backward())
    now.arrivals = std::move(around_.arrivals);
  now.tasks = std::move(around_.tasks);
  now.next_launch = 0;
  now.recorded_adding.reset();
}

bool GradientRecording::fits(const Recorded& graph) const {
  const auto& layout = reducer_.layout();
  if (graph.layout != layout.number())
    return false;
  for (size_t i = 0; i < layout.order().size(); ++i) {
    if (context_.at(layout.order()[i]).grad.const_data_ptr() != graph.grads[i])
      return false;
  }
  return true;
}

void GradientRecording::before_replay(const Recorded& graph) {
  TORCH_CHECK(!reducer_.in_backward(),
              "lightning_zero: weights got gradients from outside of the compiled code, ",
              "whose backward is replayed as a graph, in one backward pass with it. Pass cuda_graphs=False "
              "to the strategy.");
  TORCH_CHECK(compat::is_whole_backward(),
              "lightning_zero: backward(inputs=...) or torch.autograd.grad() asked for some gradients only, ",
              "of compiled code whose backward is replayed as a graph, with all of them. Pass "
              "cuda_graphs=False to the strategy.");
  reducer_.join();
  overwritten_.clear();
  for (const auto i : std::set<int64_t>(graph.arrivals.begin(), graph.arrivals.end())) {
    auto& record = context_.at(i);
    const auto& held = record.param.grad();
    const bool adds = held.defined();
    if (adds && held.const_data_ptr() != record.grad.const_data_ptr())
      record.grad.copy_(held.reshape({-1}));  // somebody's own, which counts as accumulated
    if (adds && !graph.adding) {
      overwritten_.emplace_back(record.grad, record.grad.clone());
    } else if (!adds && graph.adding) {
      record.grad.zero_();
    }
  }
}

void GradientRecording::after_replay(const Recorded& graph) {
  for (const auto& [grad, before] : std::exchange(overwritten_, {})) grad.add_(before);
  auto& now = reducer_.backward();
  auto& layout = reducer_.layout();
  for (const auto i : graph.arrivals) {
    now.arrivals.push_back(i);
    ++layout.slot(layout.position(i)).arrivals;
  }
  for (size_t b = 0; b < graph.launched; ++b) layout.buckets()[b].has_left();
  now.next_launch = graph.launched;
  transports_.reduce().after_replay(graph.traffic);
}

}  // namespace lightning_zero
