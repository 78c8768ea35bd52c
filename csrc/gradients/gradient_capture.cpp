#include "gradients/gradient_capture.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <set>

#include "gradients/grad_aliasing.h"
#include "torch_compat.h"

namespace lightning_zero {

namespace {

// Replaces the id of autograd's graph task during a capture.
constexpr int kCaptureTask = -1;

}  // namespace

std::string GradientCapture::disabled_reason(int64_t segment) const {
  auto& layout = reducer_.layout();
  if (layout.size() == 0 || !layout.segments().is_learned() || layout.is_stale())
    return "no backward pass has shown the order of gradients yet";
  for (const auto index : layout.order()) {
    if (!context_.at(index).grad.defined())
      return "gradients have no memory yet";
  }
  if (segment >= 0 && layout.segments().index_of(segment) < 0)
    return "the order of compiled graphs in the backward pass keeps changing";
  return {};
}

void GradientCapture::begin(bool backward, bool adding, int64_t segment) {
  auto& now = reducer_.backward();
  auto& layout = reducer_.layout();
  recorded_ = {};
  recorded_.adding = adding;
  recorded_.deferred = reducer_.deferred().is_on();
  recorded_.sends_deferred = !recorded_.deferred && reducer_.deferred().has_any();
  recorded_.layout = layout.version();
  recorded_.begin = recorded_.end = layout.first_bucket_of(layout.segments().index_of(segment));
  for (const auto i : layout.order()) recorded_.grads.push_back(context_.at(i).grad.const_data_ptr());
  // Do this before saving the state that restore() puts back: launched buckets send deferred gradients.
  if (!reducer_.backward().goes_on())
    reducer_.release_buffers();
  else if (segment >= 0 && !reducer_.deferred().is_full())
    launch_up_to(recorded_.begin);
  else
    reducer_.pools().drain();  // launched reductions refer to buckets that restore() replaces
  // A replay finds deferred gradients or zeros, see before_replay().
  outer_records_.clear();
  grad_aliasing::forget_reads(context_);
  for (auto& record : context_.records) {
    auto& sum = record->deferred;
    const auto& copy = record->compute_shard;
    outer_records_.emplace_back(sum.filled, sum.version, copy.state, copy.gradient_arrived);
    const bool filled = sum.memory.defined() && (recorded_.deferred || recorded_.sends_deferred);
    if (filled && !sum.filled && !has_streams(context_.device))
      sum.memory.zero_();  // a CPU executes what it captures
    sum.filled = filled;
  }
  // Captured work must not wait for earlier work, nor vice versa, so memory and fences are separate.
  outer_pools_ = reducer_.pools().exchange({});
  layout.expect(reducer_.pools());
  outer_buckets_ = layout.buckets();
  outer_late_buckets_ = layout.late();
  layout.reset();
  outer_backward_ = now;
  now.tasks.clear();
  if (backward) {
    now = {};
    now.tasks = {kCaptureTask};
    now.next_launch = recorded_.begin;
  }
  now.recorded_adding = adding;
  transports_.reduce().begin_recording(backward);
}

std::string GradientCapture::finish() {
  auto& layout = reducer_.layout();
  if (reducer_.backward().goes_on()) {
    reducer_.launch_complete();  // a CPU launches nothing while gradients arrive
    reducer_.pools().drain();
  }
  const auto waits = [](const auto& bucket) { return bucket.state() == ReduceBucket::State::FILLING; };
  if (std::any_of(layout.buckets().begin(), layout.buckets().end(), waits) ||
      std::any_of(layout.late().begin(), layout.late().end(), waits))
    return "some of its gradients share buckets with those of other graphs";
  return {};
}

GradientCapture::Recorded GradientCapture::end() {
  const auto& now = reducer_.backward();
  if (reducer_.backward().goes_on()) {
    recorded_.arrivals = now.arrivals;
    recorded_.end = now.next_launch;
  }
  recorded_.traffic = transports_.reduce().end_recording();
  restore();
  if (!has_streams(context_.device))
    note_deferred(recorded_);
  return std::move(recorded_);
}

void GradientCapture::abort() {
  transports_.reduce().abort_recording();
  restore();
}

void GradientCapture::restore() {
  auto& layout = reducer_.layout();
  layout.buckets() = std::move(outer_buckets_);
  layout.late() = std::move(outer_late_buckets_);
  // The graph's fences and memory belong to the graph.
  reducer_.pools().exchange(std::move(outer_pools_));
  reducer_.backward() = std::move(outer_backward_);
  grad_aliasing::forget_reads(context_);
  for (size_t i = 0; i < outer_records_.size(); ++i) {
    auto& record = *context_.records[i];
    std::tie(record.deferred.filled, record.deferred.version, record.compute_shard.state,
             record.compute_shard.gradient_arrived) = outer_records_[i];
  }
}

bool GradientCapture::fits(const Recorded& graph) const {
  const auto& layout = reducer_.layout();
  if (graph.layout != layout.version())
    return false;
  for (size_t i = 0; i < layout.order().size(); ++i) {
    if (context_.at(layout.order()[i]).grad.const_data_ptr() != graph.grads[i])
      return false;
  }
  return true;
}

// Launch all buckets before this one, so that buckets are launched in one order on every rank, and make the
// current stream wait for them.
void GradientCapture::launch_up_to(size_t bucket) {
  TORCH_CHECK(reducer_.backward().next_launch <= bucket,
              "lightning_zero: compiled code whose backward is replayed as a CUDA graph ran in another "
              "order than at its capture, after code whose gradients every rank must send later. Pass "
              "cuda_graph_model=False in Tuning(...) to the strategy.");
  reducer_.launch_before(bucket);
  reducer_.pools().drain();
}

// Gradients that arrived eagerly for the graph's parameters are sent later, in late buckets.
void GradientCapture::move_to_late_buckets(const Recorded& graph) {
  auto& layout = reducer_.layout();
  for (size_t b = graph.begin; b < graph.end; ++b) {
    auto &bucket = layout.buckets()[b], &late = layout.late()[b];
    if (bucket.state() != ReduceBucket::State::FILLING)
      continue;
    TORCH_INTERNAL_ASSERT(late.state() == ReduceBucket::State::EMPTY);
    std::swap(bucket, late);
    for (auto& slot : late.slots()) slot.add = true;
  }
}

void GradientCapture::before_replay(const Recorded& graph) {
  TORCH_CHECK(compat::is_full_backward(),
              "lightning_zero: backward(inputs=...) or torch.autograd.grad() requested only some "
              "gradients ",
              "of compiled code whose backward is replayed as a CUDA graph, which computes all of "
              "them. Pass cuda_graph_model=False in Tuning(...) to the strategy.");
  reducer_.join();
  TORCH_CHECK(graph.deferred == reducer_.deferred().is_on(),
              "lightning_zero: this micro-batch was the last one before the optimizer step in its "
              "forward but not in its backward, or vice versa. Put both inside no_backward_sync().");
  if (!reducer_.deferred().is_full()) {
    launch_up_to(graph.begin);
    move_to_late_buckets(graph);
  }
  overwritten_.clear();
  const auto& layout = reducer_.layout();
  for (const auto i : std::set<int64_t>(graph.arrivals.begin(), graph.arrivals.end())) {
    auto& record = context_.at(i);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !compat::has_hooks(record.param), "lightning_zero: register_hook() was called on ", record.name,
        " between a forward that was replayed as a CUDA graph and its backward, which would not "
        "run the hook. Call it before the forward, for example in on_train_start() or "
        "on_train_batch_start(), or pass cuda_graph_model=False in Tuning(...) to the strategy.");
    if ((graph.deferred || graph.sends_deferred) && !record.deferred.filled)
      record.deferred.memory.zero_();
    if (graph.deferred)
      continue;
    const auto [position, repeated] = find_slot(graph, i);
    const bool sent = layout.was_launched(i, position.bucket);
    if (!sent)
      record.accept_user_gradient();
    const bool adds = sent || record.param.grad().defined(), recorded = graph.adding || repeated;
    if (adds != recorded && record.is_grad_aliased())
      grad_aliasing::raise_in_use(record);
    if (adds && !recorded) {
      overwritten_.emplace_back(record.grad, record.grad.clone());
    } else if (!adds && recorded) {
      record.grad.zero_();
    }
  }
}

void GradientCapture::after_replay(const Recorded& graph) {
  for (const auto& [grad, before] : std::exchange(overwritten_, {})) grad.add_(before);
  auto& now = reducer_.backward();
  auto& layout = reducer_.layout();
  now.arrivals.insert(now.arrivals.end(), graph.arrivals.begin(), graph.arrivals.end());
  for (const auto i : graph.arrivals) grad_aliasing::note_arrival(context_.at(i));
  note_deferred(graph);
  if (reducer_.deferred().is_full())
    return;
  for (size_t b = graph.begin; b < graph.end; ++b) {
    auto& bucket = layout.buckets()[b];
    bucket.mark_launched();
    for (auto& slot : bucket.slots()) grad_aliasing::begin_gradient(*slot.record, context_.device);
    now.segment = bucket.segment();
  }
  for (const auto i : graph.arrivals) ++layout.slot(find_slot(graph, i).first).arrivals;
  now.next_launch = std::max(now.next_launch, graph.end);
  transports_.reduce().after_replay(graph.traffic);
}

void GradientCapture::note_deferred(const Recorded& graph) {
  if (!graph.deferred && !graph.sends_deferred)
    return;
  for (const auto i : graph.arrivals) {
    auto& sum = context_.at(i).deferred;
    if (graph.deferred)
      sum.filled = true;
    else
      sum.clear();
  }
}

// Return the parameter's slot among the graph's buckets, and whether earlier buckets have one too.
std::pair<BucketLayout::Position, bool> GradientCapture::find_slot(const Recorded& graph, int64_t index) {
  auto& layout = reducer_.layout();
  for (const auto position : layout.positions(index)) {
    const auto bucket = static_cast<size_t>(position.bucket);
    if (graph.begin <= bucket && bucket < graph.end)
      return {position, layout.slot(position).repeated};
  }
  TORCH_INTERNAL_ASSERT(false, context_.at(index).name, " has no slot in the buckets of a graph");
}

}  // namespace lightning_zero
