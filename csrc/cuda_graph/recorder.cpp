// The Executor's part in replaying compiled code as graphs of the device. See [Note: captured graphs].
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "executor.h"

namespace lightning_zero {

namespace {

// In place of autograd's task while a backward is recorded.
constexpr int kRecording = -1;

}  // namespace

std::string Executor::why_not_recorded() const {
  std::lock_guard lock(mutex_);
  if (options_.poison || options_.sync_collectives)
    return "collectives are being debugged";
  if (recording_)
    return "another graph is being recorded";
  if (buckets_.empty() || !order_learned_ || plan_is_stale())
    return "no backward pass has shown in which order gradients come";
  for (const auto index : order_) {
    if (!records_[index]->grad.defined())
      return "gradients have no memory yet";
  }
  if (!arriving_.empty())
    return "weights that are kept over a step are still on their way";
  if (!tracked_.empty())
    return "code that is not compiled holds weights";
  return {};
}

void Executor::record_graph(bool backward, bool adding) {
  std::lock_guard lock(mutex_);
  const auto reason = why_not_recorded();
  TORCH_INTERNAL_ASSERT(reason.empty(), reason);
  // Nothing that was launched before may be waited for inside, and nothing inside from without.
  release_buffers();
  pools_.clear();
  expect_buckets();
  drop_ahead();
  first_groups_.clear();
  noting_first_ = false;
  gather_comm_.record();
  reduce_comm_.record();
  recording_.emplace();
  auto& graph = recording_->graph;
  graph.adding = adding;
  graph.meetings = meetings_;
  graph.plan = plans_made_;
  graph.counters = std::exchange(counters_, {});
  for (const auto i : order_) graph.grads.push_back(records_[i]->grad.const_data_ptr());
  recording_->tasks = std::exchange(tasks_, {});
  if (backward) {
    TORCH_INTERNAL_ASSERT(next_launch_ == 0);
    tasks_ = {kRecording};
    recording_->arrivals = std::exchange(arrivals_, {});
    rounds_ = 0;
  }
}

int64_t Executor::end_recording() {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(recording_.has_value());
  if (!tasks_.empty()) {
    // A CPU launches nothing while gradients arrive.
    while (next_launch_ < buckets_.size() && buckets_[next_launch_].complete())
      launch(buckets_[next_launch_++]);
    for (auto& [dtype, pool] : pools_) pool->drain();
  }
  const auto waits = [](const auto& bucket) { return bucket.state() == ReduceBucket::State::FILLING; };
  std::string reason;
  if (std::any_of(buckets_.begin(), buckets_.end(), waits) ||
      std::any_of(late_.begin(), late_.end(), waits)) {
    reason = "some of its gradients travel together with those of other graphs";
  } else if (!arriving_.empty()) {
    reason = "weights that are kept over a step arrive in another graph";
  }
  gather_comm_.join();
  reduce_comm_.join();
  auto graph = std::move(recording_->graph);
  if (!tasks_.empty())
    graph.arrivals = arrivals_;
  graph.launched = next_launch_;
  graph.rounds = rounds_;
  graph.meetings = std::exchange(meetings_, graph.meetings) - graph.meetings;
  if (!has_streams(device_))
    meetings_ += graph.meetings;  // they took place
  graph.counters.swap(counters_);
  forget_recording();
  if (!reason.empty())
    forget_kept(graph);
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), reason);
  graphs_.emplace(++graphs_made_, std::move(graph));
  return graphs_made_;
}

void Executor::abort_recording() {
  std::lock_guard lock(mutex_);
  if (!recording_)
    return;
  for (auto* comm : {&gather_comm_, &reduce_comm_}) {
    try {
      comm->join();  // or the capture could not even be ended
    } catch (const c10::Error&) {
      // It is lost already, by what could not be captured. Ending it is all that is left to do.
    }
  }
  meetings_ = recording_->graph.meetings;
  forget_kept(recording_->graph);
  counters_ = std::move(recording_->graph.counters);
  forget_recording();
}

void Executor::forget_recording() {
  for (auto& bucket : buckets_) bucket.reset();
  for (auto& bucket : late_) bucket.reset();
  // Their fences belong to the graph, and so does their memory.
  pools_.clear();
  expect_buckets();
  arriving_.clear();
  if (!tasks_.empty())
    arrivals_ = std::move(recording_->arrivals);
  tasks_ = std::move(recording_->tasks);
  next_launch_ = 0;
  gather_comm_.stop_recording();
  reduce_comm_.stop_recording();
  recording_.reset();
}

bool Executor::has_gradients() const {
  std::lock_guard lock(mutex_);
  return std::any_of(order_.begin(), order_.end(),
                     [&](int64_t i) { return records_[i]->param.grad().defined(); });
}

bool Executor::is_whole_backward() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted == nullptr || wanted->empty();
}

const Executor::Recorded& Executor::recorded(int64_t index) const {
  const auto found = graphs_.find(index);
  TORCH_CHECK(
      found != graphs_.end(),
      "lightning_zero: the weights of a forward pass, which was replayed as a graph, are gone: "
      "lightning_zero.unshard() was called, or the strategy was closed, before its backward pass. Run "
      "the backward pass first.");
  return found->second;
}

bool Executor::fits(int64_t forward, int64_t backward) const {
  std::lock_guard lock(mutex_);
  if (plan_is_stale())
    return false;
  std::set<int64_t> gathered;  // by the forward, for its backward
  for (const auto number : {forward, backward}) {
    const auto& graph = recorded(number);
    if (graph.plan != plans_made_)
      return false;
    for (size_t i = 0; i < order_.size(); ++i) {
      if (records_[order_[i]]->grad.const_data_ptr() != graph.grads[i])
        return false;
    }
    gathered.insert(graph.kept.begin(), graph.kept.end());
    for (const auto i : graph.kept_before) {
      if (!is_kept(*records_[i]) && gathered.count(i) == 0)
        return false;
    }
  }
  return true;
}

void Executor::forget_kept(const Recorded& graph) {
  for (const auto i : graph.kept) records_[i]->kept_epoch = -1;
}

void Executor::never_ran(int64_t index) {
  std::lock_guard lock(mutex_);
  forget_kept(recorded(index));
}

void Executor::drop_graph(int64_t index) {
  std::lock_guard lock(mutex_);
  graphs_.erase(index);
}

void Executor::meet_peers() {
  std::lock_guard lock(mutex_);
  if (!tracked_.empty())
    sync_edits(/*forget=*/false);
  drop_ahead();
  if (!turns_)
    return publish(/*everything=*/false, /*wait=*/true);
  begin_reading();
  gather_comm_.catch_up();  // the graph reads on streams of its own, which follow the current one
}

void Executor::before_replay(int64_t index) {
  std::lock_guard lock(mutex_);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& graph = recorded(index);
  meet_peers();
  if (graph.arrivals.empty())
    return;
  TORCH_CHECK(
      tasks_.empty(), "lightning_zero: weights got gradients from outside of the compiled code, ",
      "whose backward is replayed as a graph, in one backward pass with it. Pass capture_graphs=False "
      "to the strategy.");
  TORCH_CHECK(is_whole_backward(),
              "lightning_zero: backward(inputs=...) or torch.autograd.grad() asked for some gradients only, ",
              "of compiled code whose backward is replayed as a graph, with all of them. Pass "
              "capture_graphs=False to the strategy.");
  join_round();
  apart_.clear();
  for (const auto i : std::set<int64_t>(graph.arrivals.begin(), graph.arrivals.end())) {
    auto& record = *records_[i];
    const auto& held = record.param.grad();
    const bool adds = held.defined();
    if (adds && held.const_data_ptr() != record.grad.const_data_ptr())
      record.grad.copy_(held.reshape({-1}));  // somebody's own, which counts as accumulated
    if (adds && !graph.adding) {
      apart_.emplace_back(record.grad, record.grad.clone());
    } else if (!adds && graph.adding) {
      record.grad.zero_();
    }
  }
}

void Executor::after_replay(int64_t index) {
  std::lock_guard lock(mutex_);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& graph = recorded(index);
  for (const auto& [name, by] : graph.counters) counters_[name] += by;
  count("replayed_graphs");
  for (const auto i : graph.kept) keep(*records_[i]);
  if (graph.arrivals.empty())
    return;
  for (const auto& [grad, before] : std::exchange(apart_, {})) grad.add_(before);
  for (const auto i : graph.arrivals) {
    arrivals_.push_back(i);
    ++buckets_[position_[i].bucket].slots()[position_[i].slot].arrivals;
  }
  for (size_t b = 0; b < graph.launched; ++b) buckets_[b].has_left();
  next_launch_ = graph.launched;
  rounds_ = graph.rounds;
  if (has_streams(device_))
    meetings_ += graph.meetings;
}

}  // namespace lightning_zero
