#include "executor.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace lightning_zero {

namespace {

// torch.autograd.grad() and backward(inputs=...) are after the gradients of some tensors only, but a compiled
// graph hands over those of all its weights.
bool is_wanted(const ParamRecord& record) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty())
    return true;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(record.param);
  const auto found = accumulator ? wanted->find(accumulator.get()) : wanted->end();
  if (found == wanted->end() || !found->second.should_execute())
    return false;
  TORCH_CHECK(!found->second.captures_,
              "lightning_zero: torch.autograd.grad() cannot return the gradient of ", record.name,
              ", because sharded gradients go to param.grad. Call loss.backward(), or "
              "loss.backward(inputs=[...]), and read param.grad.");
  return true;
}

}  // namespace

// Lives in autograd's list of final callbacks. Destroyed without having run, it means that the backward was
// interrupted by an exception.
class Executor::Round {
 public:
  explicit Round(Executor& executor)
      : executor_(c10::intrusive_ptr<Executor>::unsafe_reclaim_from_nonowning(&executor)) {}
  ~Round() {
    if (ran_)
      return;
    try {
      executor_->abort_backward();
    } catch (const std::exception&) {
      // See ~Executor: what interrupted the backward is on its way to the user.
    }
  }
  void run() {
    ran_ = true;
    executor_->end_backward();
  }

 private:
  c10::intrusive_ptr<Executor> executor_;
  bool ran_ = false;
};

Executor::Executor(const std::string& gather_group, const std::string& reduce_group,
                   const std::string& control_group, const std::string& device)
    : device_(device),
      gather_comm_(gather_group, device_, Lane::GATHER),
      reduce_comm_(reduce_group, device_, Lane::REDUCE) {
  if (gather_comm_.size() > 1)
    control_comm_.emplace(control_group, c10::Device(c10::kCPU), Lane::CONTROL);
}

Executor::~Executor() {
  try {
    close();
  } catch (const std::exception&) {
    // After an error of the device every call throws, and a destructor that throws ends the process before
    // the error that came first is shown.
  }
}

void Executor::watch(c10::intrusive_ptr<Watchdog> watchdog) {
  std::lock_guard lock(mutex_);
  gather_comm_.watch(watchdog);
  reduce_comm_.watch(watchdog);
  if (control_comm_)
    control_comm_->watch(watchdog);
  if (turns_)
    turns_->watch(watchdog);
  watchdog_ = std::move(watchdog);
}

void Executor::configure(ExecutorOptions options) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(tasks_.empty(), "options cannot change during backward");
  options_ = std::move(options);
  gather_comm_.synchronize_each = reduce_comm_.synchronize_each = options_.sync_collectives;
  gather_comm_.poison(options_.poison);
  reduce_comm_.poison(options_.poison);
  release_buffers();
  pools_.clear();
  buckets_.clear();
}

int64_t Executor::add_parameter(std::string name, at::Tensor param, at::Tensor shard, int64_t numel,
                                std::vector<int64_t> shape, std::vector<int64_t> order) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(shard.dim() == 1 && shard.is_contiguous() && shard.numel() > 0 &&
                        shard.device() == device_);
  TORCH_INTERNAL_ASSERT(numel <= size() * shard.numel());
  auto record = std::make_unique<ParamRecord>();
  record->index = static_cast<int64_t>(records_.size());
  record->name = std::move(name);
  record->param = std::move(param);
  record->shard = std::move(shard);
  record->numel = numel;
  record->shape = std::move(shape);
  record->order = std::move(order);
  ShardTable::instance().add(record->shard, ParamRef{this, record->index});
  records_.push_back(std::move(record));
  expected_.push_back(1);
  position_.emplace_back();
  buckets_.clear();  // plan again
  return records_.back()->index;
}

void Executor::move_parameter(int64_t index, at::Tensor shard) {
  std::lock_guard lock(mutex_);
  auto& record = at(index);
  TORCH_INTERNAL_ASSERT(shard.dim() == 1 && shard.is_contiguous() && shard.numel() == record.shard_numel());
  sync_edits(/*forget=*/true);
  ShardTable::instance().remove(record.shard);
  published_ = false;
  record.shards.clear();
  record.shard = std::move(shard);
  ShardTable::instance().add(record.shard, ParamRef{this, index});
}

void Executor::drop_parameter(int64_t index) {
  std::lock_guard lock(mutex_);
  auto& record = at(index);
  ShardTable::instance().remove(record.shard);
  record.live = false;
  buckets_.clear();
}

void Executor::guard_gradient(int64_t index) {
  std::lock_guard lock(mutex_);
  const auto& record = at(index);
  // The parameter owns the hook, so it must not be owned by it.
  const auto* impl = record.param.unsafeGetTensorImpl();
  record.param.register_hook([impl, name = record.name](const at::Tensor& grad) {
    TORCH_CHECK_VALUE(!grad.defined() || !ShardTable::instance().contains(impl->data()),
                      "lightning_zero: the training step computed with this rank's shard of ", name,
                      ", as self.parameters() and self.named_parameters() return it, so each rank would get "
                      "another result. Read whole weights "
                      "from their modules (self.layer.weight), or use the optimizer's weight_decay for a "
                      "penalty on all of them.");
  });
}

void Executor::close() {
  std::lock_guard lock(mutex_);
  if (watchdog_)
    watchdog_->forget_names();
  for (const auto& record : records_) {
    if (record->live)
      ShardTable::instance().remove(record->shard);
  }
  tracked_.clear();
  outdated_.clear();
  arriving_.clear();
  drop_ahead();
  first_groups_.clear();
  staging_.clear();
  shadow_memory_.clear();
  turns_.reset();
  gathered_.clear();
  buckets_.clear();
  late_.clear();
  pools_.clear();
  // Whoever holds the outputs of a replayed forward may still begin its backward.
  graphs_.clear();
  order_.clear();
  apart_.clear();
  attached_.clear();
  records_.clear();
}

// ---- gradients

void Executor::ensure_grad(ParamRecord& record) {
  if (!record.grad.defined())
    record.grad = at::zeros_like(record.shard);
}

void Executor::join_round() {
  if (recording_)
    return;
  const int task = torch::autograd::get_current_graph_task_id();
  TORCH_CHECK(task >= 0,
              "lightning_zero: a gradient arrived outside of a backward pass. Gradients must come from "
              "loss.backward().");
  if (std::find(tasks_.begin(), tasks_.end(), task) != tasks_.end())
    return;
  if (tasks_.empty()) {
    arrivals_.clear();
    next_launch_ = 0;
    rounds_ = 0;
    meetings_before_ = meetings_;
    if (plan_is_stale())
      plan_buckets();
  }
  tasks_.push_back(task);
  auto round = std::make_shared<Round>(*this);
  torch::autograd::Engine::get_default_engine().queue_callback([round] { round->run(); });
}

void Executor::open(ReduceBucket& bucket, bool adding) {
  if (bucket.state() != ReduceBucket::State::EMPTY)
    return;
  for (auto& slot : bucket.slots()) ensure_grad(*slot.record);
  auto* buffer = pool(bucket.dtype()).acquire(bucket.chunk(), pool_stats_);
  bucket.poison = options_.poison;
  bucket.apart = !staging_.empty();
  if (options_.poison && buffer->send.defined())
    fill_with_poison(buffer->send);
  bucket.open(buffer, adding, recording_ ? std::optional(recording_->graph.adding) : std::nullopt);
}

void Executor::reduce(int64_t index, const at::Tensor& grad, bool hold) {
  std::lock_guard lock(mutex_);
  at::AutoDispatchBelowADInplaceOrView no_autograd;  // and not only no graph: the way through it takes time
  auto& record = at(index);
  TORCH_CHECK(grad.numel() == record.numel, "lightning_zero: the gradient of ", record.name, " has shape ",
              grad.sizes(), " but the parameter has shape ", at::IntArrayRef(record.shape), ".");
  if (torch::autograd::get_current_graph_task_id() >= 0 && !is_wanted(record))
    return;
  join_round();
  auto position = position_[index];
  TORCH_CHECK(
      position.bucket >= 0, "lightning_zero: a gradient arrived for ", record.name,
      ", whose requires_grad was switched on during this backward pass. Change requires_grad between steps.");
  count("reduces");
  touch(record);
  arrivals_.push_back(index);
  const bool late = buckets_[position.bucket].state() == ReduceBucket::State::LAUNCHED;
  auto& bucket = (late ? late_ : buckets_)[position.bucket];
  open(bucket, /*adding=*/late);
  const bool scale = options_.predivide && staging_.empty();
  bucket.put(position.slot, grad, scale ? 1.0 / static_cast<double>(size()) : 1.0,
             hold && !late && !staging_.empty());
  if (!late)
    launch_complete();
}

void Executor::launch_complete() {
  // When the host waits for each collective, it must not wait for peers that have no such gradient: launch
  // after the agreement.
  if (options_.sync_collectives || (!staging_.empty() && !has_streams(device_) && size() > 1))
    return;
  while (next_launch_ < buckets_.size() && buckets_[next_launch_].complete())
    launch(buckets_[next_launch_++]);
}

void Executor::launch(ReduceBucket& bucket) {
  bucket.seal();
  count("flushes");
  count("reduce_bytes", size() * bucket.chunk() * static_cast<int64_t>(c10::elementSize(bucket.dtype())));
  if (!staging_.empty())
    return push(bucket);
  const auto op = options_.predivide ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
  const auto send = bucket.send();
  std::vector<at::Tensor> parts, runs;
  for (size_t index = 0; index < bucket.slots().size(); ++index) {
    parts.push_back(bucket.part(bucket.slots()[index]));
    runs.push_back(bucket.run(index));
  }
  bucket.buffer()->pending = reduce_comm_.reduce_scatter_group(parts, runs, send, op, [&bucket] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    bucket.accumulate(bucket.recv().unsqueeze(0), 0);
  });
}

// Devices wait for their peers' parts of what has left, and this rank's host may wait for its device (a
// kernel is tuned at its first run, memory is freed, a hook reads a value), and then does not come to the
// agreement. So nothing that a peer's device waits for may come after it: a rank that lacks gradients sends
// zeros instead.
void Executor::launch_all() {
  if (!has_streams(device_) || options_.sync_collectives || size() == 1)
    return;
  for (; next_launch_ < buckets_.size(); ++next_launch_) {
    open(buckets_[next_launch_], /*adding=*/false);
    launch(buckets_[next_launch_]);
  }
}

std::vector<int64_t> Executor::agree() {
  // Per trainable parameter: 1 a gradient arrived, 2 one arrived after its bucket had left. And twice a
  // digest of the order of arrival, to see whether it was the same everywhere.
  std::vector<int64_t> flags(order_.size() + 5, 0);
  int64_t digest = 1469598103934665603LL;
  for (auto index : arrivals_)
    digest = static_cast<int64_t>((static_cast<uint64_t>(digest) ^ index) * 1099511628211ULL);
  digest = std::abs(digest / 2);
  for (size_t i = 0; i < order_.size(); ++i) {
    const auto position = position_[order_[i]];
    if (buckets_[position.bucket].slots()[position.slot].arrivals > 0)
      flags[i] = 1;
    if (late_[position.bucket].state() == ReduceBucket::State::FILLING &&
        late_[position.bucket].slots()[position.slot].arrivals > 0) {
      flags[i] = 2;
    }
  }
  flags[order_.size()] = digest;
  flags[order_.size() + 1] = -digest;
  flags[order_.size() + 2] = meetings_before_;
  flags[order_.size() + 3] = -meetings_before_;
  flags[order_.size() + 4] = to_say_ ? 1 : 0;
  if (control_comm_) {
    auto values = at::tensor(flags, at::kLong);
    control_comm_->all_reduce_max(values, "the agreement at the end of a backward pass");
    std::copy_n(values.const_data_ptr<int64_t>(), flags.size(), flags.begin());
    count("agreements");
    // Signals carry no name: ranks that met at different times would add up what is not there yet, without a
    // word.
    TORCH_CHECK(
        flags[order_.size() + 2] == -flags[order_.size() + 3],
        "lightning_zero: an earlier backward pass was interrupted at different points on different ranks, so "
        "their gradients no longer fit together. Let the exception that interrupted it end the training on "
        "all "
        "ranks, and resume from a checkpoint.");
  }
  said_ = said_ || flags[order_.size() + 4] != 0;
  return flags;
}

void Executor::end_backward() {
  {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    launch_all();
    const auto flags = agree();
    std::vector<int64_t> wanted(buckets_.size(), 0);
    for (size_t i = 0; i < order_.size(); ++i) {
      auto& most = wanted[position_[order_[i]].bucket];
      most = std::max(most, flags[i]);
    }
    for (size_t b = next_launch_; b < buckets_.size(); ++b) {
      if (wanted[b] == 0)
        continue;
      open(buckets_[b], /*adding=*/false);
      launch(buckets_[b]);
    }
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (wanted[b] < 2)
        continue;
      open(late_[b], /*adding=*/true);
      launch(late_[b]);
      count("late_flushes");
    }
    for (auto& [dtype, pool] : pools_) pool->drain();
    attach(flags);
    learn_order(flags);
    finish_round();
    ++backwards_;
  }
  // Without the lock: hooks are Python, and may gather.
  if (!backward_end_op_.empty()) {
    torch::jit::Stack stack;
    c10::Dispatcher::singleton().findSchemaOrThrow(backward_end_op_.c_str(), "").callBoxed(&stack);
  }
}

void Executor::attach(const std::vector<int64_t>& flags) {
  attached_.clear();
  for (size_t i = 0; i < order_.size(); ++i) {
    if (flags[i] == 0)
      continue;  // no rank used it: leave grad as it is, so that weight decay leaves it alone
    auto& record = at(order_[i]);
    attached_.push_back(record.index);
    auto& held = record.param.mutable_grad();
    if (!held.defined() || held.const_data_ptr() != record.grad.const_data_ptr()) {
      auto& shown = record.visible_grad;
      if (!shown.defined() || shown.const_data_ptr() != record.grad.const_data_ptr())
        shown = record.grad.view(record.param.sizes());
      held = shown;
    }
  }
}

void Executor::finish_round() {
  for (auto& bucket : buckets_) bucket.reset();
  for (auto& bucket : late_) bucket.reset();
  tasks_.clear();
  next_launch_ = 0;
  if (options_.free_buckets)
    release_buffers();
}

void Executor::abort_backward() {
  std::lock_guard lock(mutex_);
  abort_recording();
  apart_.clear();
  if (tasks_.empty())
    return;
  if (barrier_) {
    barrier_->let_pass(true);  // peers may have been interrupted elsewhere
    interrupted_ = true;
  }
  for (auto& [dtype, pool] : pools_) pool->discard();
  for (auto& bucket : buckets_) bucket.reset();
  for (auto& bucket : late_) bucket.reset();
  tasks_.clear();
  next_launch_ = 0;
  count("aborted_backwards");
}

void Executor::release_buffers() {
  std::lock_guard lock(mutex_);
  for (auto& [dtype, pool] : pools_) pool->release();
}

std::map<std::string, int64_t> Executor::counters() const {
  std::lock_guard lock(mutex_);
  auto all = counters_;
  all["grown_buckets"] = pool_stats_.grown;
  all["allocated_buckets"] = pool_stats_.allocated;
  all["bucket_bytes"] = 0;
  for (const auto& [dtype, pool] : pools_) all["bucket_bytes"] += pool->bytes();
  all["buckets"] = static_cast<int64_t>(buckets_.size());
  all["watched_weights"] = static_cast<int64_t>(tracked_.size());
  return all;
}

}  // namespace lightning_zero
