#include "cuda_graph/recorder.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <set>

namespace lightning_zero {

std::string Recorder::disabled_reason(int64_t segment) const {
  Lock lock(context_.mutex);
  if (context_.options.poison || context_.options.sync_collectives)
    return "collectives are being debugged";
  if (recording_)
    return "another graph is being recorded";
  if (const auto reason = gradients_.disabled_reason(segment); !reason.empty())
    return reason;
  return weights_.disabled_reason();
}

void Recorder::begin(bool backward, bool adding, int64_t segment) {
  Lock lock(context_.mutex);
  const auto reason = disabled_reason(segment);
  TORCH_INTERNAL_ASSERT(reason.empty(), reason);
  gradients_.begin(backward, adding, segment);
  weights_.begin();
  communicators_.begin_recording();
  counters_ = std::exchange(context_.counters, {});
  recording_ = true;
}

int64_t Recorder::end() {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(recording_);
  auto reason = gradients_.finish();
  if (reason.empty())
    reason = weights_.finish();
  communicators_.join();
  Recorded graph;
  graph.gradients = gradients_.end();
  graph.weights = weights_.end();
  graph.counters = std::exchange(context_.counters, std::move(counters_));
  graph.meetings = communicators_.end_recording();
  recording_ = false;
  if (!reason.empty())
    weights_.mark_not_run(graph.weights);
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), reason);
  graphs_.emplace(++made_, std::move(graph));
  return made_;
}

void Recorder::abort() {
  Lock lock(context_.mutex);
  if (!recording_)
    return;
  communicators_.join_whatever_happened();
  gradients_.abort();
  weights_.mark_not_run(weights_.end());
  context_.counters = std::move(counters_);
  communicators_.end_recording();
  recording_ = false;
}

const Recorder::Recorded& Recorder::recorded(int64_t graph) const {
  const auto found = graphs_.find(graph);
  TORCH_CHECK(
      found != graphs_.end(),
      "lightning_zero: the weights of a forward pass, which was replayed as a graph, are gone: "
      "lightning_zero.unshard() was called, or the strategy was closed, before its backward pass. Run "
      "the backward pass first.");
  return found->second;
}

bool Recorder::fits(int64_t forward, int64_t backward) const {
  Lock lock(context_.mutex);
  std::set<int64_t> gathered;  // by the forward, for its backward
  for (const auto number : {forward, backward}) {
    if (gradients_.is_stale())
      return false;
    const auto& graph = recorded(number);
    if (!gradients_.fits(graph.gradients) || !weights_.fits(graph.weights, gathered))
      return false;
  }
  return true;
}

void Recorder::mark_not_run(int64_t graph) {
  Lock lock(context_.mutex);
  weights_.mark_not_run(recorded(graph).weights);
}

void Recorder::drop(int64_t graph) {
  Lock lock(context_.mutex);
  graphs_.erase(graph);
}

void Recorder::before_replay(int64_t number) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& graph = recorded(number);
  weights_.before_replay(graph.weights);
  communicators_.before_replay(graph.meetings);
  if (!graph.gradients.arrivals.empty())
    gradients_.before_replay(graph.gradients);
}

void Recorder::after_replay(int64_t number) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& graph = recorded(number);
  for (const auto& [name, by] : graph.counters) context_.counters[name] += by;
  context_.count("replayed_graphs");
  communicators_.after_replay(graph.meetings);
  weights_.after_replay(graph.weights);
  if (!graph.gradients.arrivals.empty())
    gradients_.after_replay(graph.gradients);
}

void Recorder::close() {
  // Whoever holds the outputs of a replayed forward may still begin its backward.
  graphs_.clear();
  gradients_.forget_replay();
}

}  // namespace lightning_zero
