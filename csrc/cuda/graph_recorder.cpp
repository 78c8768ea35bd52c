#include "cuda/graph_recorder.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <set>

#include "gradients/grad_aliasing.h"

namespace lightning_zero {

std::string WeightCapture::disabled_reason() const {
  if (weights_.unsharded_cache().has_pending())
    return "gathers of cached weights have not completed";
  // Edits of held weights reach the shards before each replay. Ranks that copy without an epoch lock must
  // have published alike, and they may hold weights for different times.
  const auto& access = weights_.access();
  if (weights_.watched() > 0 && access.is_shared() && !access.uses_epoch_lock())
    return "eager code holds weights";
  return {};
}

void WeightCapture::begin() {
  // Captured work must not wait for earlier work, nor vice versa.
  weights_.prefetcher().forget();
  grad_aliasing::begin_noting_reads(context_);
  weights_.unsharded_cache().begin_recording();
  weights_.compute_shards().recording = true;
  gathered_before_ = weights_.log().size();
  if (auto* exchange = weights_.exchange())
    exchange->begin_recording();
}

std::string WeightCapture::finish() const {
  if (weights_.unsharded_cache().has_pending())
    return "another graph waits for gathers of cached weights";
  return {};
}

WeightCapture::Recorded WeightCapture::end() {
  weights_.compute_shards().recording = false;
  auto* exchange = weights_.exchange();
  auto gathers = weights_.log().take_from(gathered_before_);
  if (!has_streams(context_.device))
    weights_.log().append(gathers);  // a CPU executes what it captures
  return {weights_.unsharded_cache().end_recording(),
          exchange ? exchange->end_recording() : HostExchange::Recorded{},
          grad_aliasing::reads_noted(context_), std::move(gathers)};
}

bool WeightCapture::fits(const Recorded& graph, std::set<int64_t>& gathered) const {
  const auto* exchange = weights_.exchange();
  return weights_.unsharded_cache().has_inputs(graph.unsharded_cache, gathered) &&
         (exchange == nullptr || exchange->fits(graph.exchange));
}

void WeightCapture::before_replay(const Recorded& graph) {
  weights_.sync_compute_shards();
  weights_.log().append(graph.gathers);
  if (auto* exchange = weights_.exchange())
    exchange->before_replay(graph.exchange);
}

std::string GraphRecorder::disabled_reason(int64_t segment) const {
  Lock lock(context_.mutex);
  if (context_.options.nan_fill || context_.options.sync_collectives)
    return "collectives are being debugged";
  if (recording_)
    return "another graph is being captured";
  if (const auto reason = gradients_.disabled_reason(segment); !reason.empty())
    return reason;
  return weights_.disabled_reason();
}

void GraphRecorder::begin(bool backward, bool adding, int64_t segment) {
  Lock lock(context_.mutex);
  const auto reason = disabled_reason(segment);
  TORCH_INTERNAL_ASSERT(reason.empty(), reason);
  gradients_.begin(backward, adding, segment);
  weights_.begin();
  communicators_.begin_recording();
  counters_ = std::exchange(context_.counters, {});
  recording_ = true;
}

int64_t GraphRecorder::end() {
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
  graph.collectives = communicators_.end_recording();
  recording_ = false;
  if (!reason.empty())
    weights_.mark_not_run(graph.weights);
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), reason);
  graphs_.emplace(++made_, std::move(graph));
  return made_;
}

void GraphRecorder::abort() {
  Lock lock(context_.mutex);
  if (!recording_)
    return;
  communicators_.join_ignoring_errors();
  gradients_.abort();
  weights_.mark_not_run(weights_.end());
  context_.counters = std::move(counters_);
  communicators_.end_recording();
  recording_ = false;
}

const GraphRecorder::Recorded& GraphRecorder::recorded(int64_t graph) const {
  const auto found = graphs_.find(graph);
  TORCH_CHECK(found != graphs_.end(),
              "lightning_zero: the weights of a forward pass that was replayed as a CUDA graph are "
              "gone: lightning_zero.unshard() was called, or the strategy was closed, before its "
              "backward pass. Run the backward pass first.");
  return found->second;
}

bool GraphRecorder::fits(int64_t forward, int64_t backward) const {
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

void GraphRecorder::mark_not_run(int64_t graph) {
  Lock lock(context_.mutex);
  weights_.mark_not_run(recorded(graph).weights);
}

void GraphRecorder::drop(int64_t graph) {
  Lock lock(context_.mutex);
  graphs_.erase(graph);
}

void GraphRecorder::before_replay(int64_t number) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& graph = recorded(number);
  weights_.before_replay(graph.weights);
  communicators_.before_replay(graph.collectives);
  if (!graph.gradients.arrivals.empty())
    gradients_.before_replay(graph.gradients);
  // Afterwards, because it may launch earlier buckets.
  grad_aliasing::check_readable(context_, graph.weights.reads);
}

void GraphRecorder::after_replay(int64_t number) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& graph = recorded(number);
  for (const auto& [name, by] : graph.counters) context_.counters[name] += by;
  context_.count("replayed_graphs");
  communicators_.after_replay(graph.collectives);
  weights_.after_replay(graph.weights);
  if (!graph.gradients.arrivals.empty())
    gradients_.after_replay(graph.gradients);
}

void GraphRecorder::close() {
  // The owner of a replayed forward's outputs may still begin its backward, which raises.
  graphs_.clear();
  gradients_.clear_replay();
}

}  // namespace lightning_zero
