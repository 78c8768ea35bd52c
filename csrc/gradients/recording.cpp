#include "gradients/recording.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <set>

#include "over_copies.h"
#include "runtime/compat.h"

namespace lightning_zero {

namespace {

// In place of autograd's task while a backward is recorded.
constexpr int kRecording = -1;

}  // namespace

std::string GradientRecording::disabled_reason(int64_t segment) const {
  auto& layout = reducer_.layout();
  if (layout.size() == 0 || !layout.segments().is_learned() || layout.is_stale())
    return "no backward pass has shown in which order gradients come";
  for (const auto index : layout.order()) {
    if (!context_.at(index).grad.defined())
      return "gradients have no memory yet";
  }
  if (segment >= 0 && layout.segments().where(segment) < 0)
    return "compiled graphs run backward in other orders all the time";
  return {};
}

void GradientRecording::begin(bool backward, bool adding, int64_t segment) {
  auto& now = reducer_.backward();
  auto& layout = reducer_.layout();
  recorded_ = {};
  recorded_.adding = adding;
  recorded_.deferred = reducer_.deferred().is_on();
  recorded_.taking = !recorded_.deferred && reducer_.deferred().any();
  recorded_.layout = layout.number();
  recorded_.begin = recorded_.end = layout.begin_of(layout.segments().where(segment));
  for (const auto i : layout.order()) recorded_.grads.push_back(context_.at(i).grad.const_data_ptr());
  // Before anything is noted that restore() puts back: what leaves here takes deferred gradients along.
  if (!reducer_.backward().goes_on())
    reducer_.release_buffers();
  else if (segment >= 0 && !reducer_.deferred().is_whole())
    come_to(recorded_.begin);
  // Replays find something there, or zeros: before_replay() sees to it.
  records_around_.clear();
  over_copies::forget_reads(context_);
  for (auto& record : context_.records) {
    auto& kept = record->deferred;
    records_around_.emplace_back(kept.filled, kept.version, record->compute_copy.holds);
    const bool filled = kept.memory.defined() && (recorded_.deferred || recorded_.taking);
    if (filled && !kept.filled && !has_streams(context_.device))
      kept.memory.zero_();  // what a CPU records takes place
    kept.filled = filled;
  }
  // Nothing that was launched before may be waited for inside, and nothing inside from without: memory and
  // fences are others.
  pools_around_ = reducer_.pools().exchange({});
  layout.expect(reducer_.pools());
  buckets_around_ = layout.buckets();
  late_around_ = layout.late();
  layout.reset();
  around_ = now;
  now.tasks.clear();
  if (backward) {
    now = {};
    now.tasks = {kRecording};
    now.next_launch = recorded_.begin;
  }
  now.recorded_adding = adding;
  transports_.reduce().begin_recording(backward);
}

std::string GradientRecording::finish() {
  auto& layout = reducer_.layout();
  if (reducer_.backward().goes_on()) {
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

void GradientRecording::abort() {
  transports_.reduce().abort_recording();
  restore();
}

void GradientRecording::restore() {
  auto& layout = reducer_.layout();
  layout.buckets() = std::move(buckets_around_);
  layout.late() = std::move(late_around_);
  // The graph's fences go with it, and its memory.
  reducer_.pools().exchange(std::move(pools_around_));
  reducer_.backward() = std::move(around_);
  over_copies::forget_reads(context_);
  for (size_t i = 0; i < records_around_.size(); ++i) {
    auto& record = *context_.records[i];
    std::tie(record.deferred.filled, record.deferred.version, record.compute_copy.holds) = records_around_[i];
  }
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

// Launches what lies before this bucket, so that buckets leave in one order on every rank, and lets the
// current stream wait for it.
void GradientRecording::come_to(size_t bucket) {
  TORCH_CHECK(
      reducer_.backward().next_launch <= bucket,
      "lightning_zero: compiled code, whose backward is replayed as a graph, ran backward in another "
      "order than when it was captured, behind code whose gradients must be sent later on every rank. "
      "Pass cuda_graph_model=False in Tuning(...) to the strategy.");
  reducer_.launch_before(bucket);
  reducer_.pools().drain();
}

// What has come from elsewhere of gradients that the graph brings goes later, by itself.
void GradientRecording::make_way(const Recorded& graph) {
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

void GradientRecording::before_replay(const Recorded& graph) {
  TORCH_CHECK(compat::is_full_backward(),
              "lightning_zero: backward(inputs=...) or torch.autograd.grad() asked for some gradients only, ",
              "of compiled code whose backward is replayed as a graph, with all of them. Pass "
              "cuda_graph_model=False in Tuning(...) to the strategy.");
  reducer_.join();
  TORCH_CHECK(
      graph.deferred == reducer_.deferred().is_on(),
      "lightning_zero: whether this micro-batch is the last before the optimizer's step was another when "
      "its forward ran than now, in its backward. Let no_backward_sync() surround both.");
  if (!reducer_.deferred().is_whole()) {
    come_to(graph.begin);
    make_way(graph);
  }
  overwritten_.clear();
  const auto& layout = reducer_.layout();
  for (const auto i : std::set<int64_t>(graph.arrivals.begin(), graph.arrivals.end())) {
    auto& record = context_.at(i);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !compat::has_hooks(record.param), "lightning_zero: register_hook() was called on ", record.name,
        " between a forward, which was replayed as a graph, and its backward, which would not run the hook. "
        "Call it before the forward, as in on_train_start() or on_train_batch_start(), or pass "
        "cuda_graph_model=False in Tuning(...) to the strategy.");
    if ((graph.deferred || graph.taking) && !record.deferred.filled)
      record.deferred.memory.zero_();
    if (graph.deferred)
      continue;
    const auto [position, again] = within(graph, i);
    const bool sent = layout.was_launched(i, position.bucket);
    if (!sent)
      record.take_in_gradient();
    const bool adds = sent || record.param.grad().defined(), recorded = graph.adding || again;
    if (adds != recorded && record.grad_over_copy())
      over_copies::refuse(record);
    if (adds && !recorded) {
      overwritten_.emplace_back(record.grad, record.grad.clone());
    } else if (!adds && recorded) {
      record.grad.zero_();
    }
  }
}

void GradientRecording::after_replay(const Recorded& graph) {
  for (const auto& [grad, before] : std::exchange(overwritten_, {})) grad.add_(before);
  auto& now = reducer_.backward();
  auto& layout = reducer_.layout();
  now.arrivals.insert(now.arrivals.end(), graph.arrivals.begin(), graph.arrivals.end());
  note_deferred(graph);
  if (reducer_.deferred().is_whole())
    return;
  for (size_t b = graph.begin; b < graph.end; ++b) {
    auto& bucket = layout.buckets()[b];
    bucket.has_left();
    for (auto& slot : bucket.slots()) over_copies::arrive(*slot.record, context_.device);
    now.segment = bucket.segment();
  }
  for (const auto i : graph.arrivals) ++layout.slot(within(graph, i).first).arrivals;
  now.next_launch = std::max(now.next_launch, graph.end);
  transports_.reduce().after_replay(graph.traffic);
}

void GradientRecording::note_deferred(const Recorded& graph) {
  if (!graph.deferred && !graph.taking)
    return;
  for (const auto i : graph.arrivals) {
    auto& kept = context_.at(i).deferred;
    if (graph.deferred)
      kept.filled = true;
    else
      kept.empty();
  }
}

// Where among the graph's buckets a parameter has its place, and whether others come before.
std::pair<BucketLayout::Position, bool> GradientRecording::within(const Recorded& graph, int64_t index) {
  auto& layout = reducer_.layout();
  for (const auto position : layout.positions(index)) {
    const auto bucket = static_cast<size_t>(position.bucket);
    if (graph.begin <= bucket && bucket < graph.end)
      return {position, layout.slot(position).again};
  }
  TORCH_INTERNAL_ASSERT(false, context_.at(index).name, " has no place among the buckets of a graph");
}

}  // namespace lightning_zero
