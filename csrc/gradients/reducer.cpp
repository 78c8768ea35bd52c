#include "gradients/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "executor.h"
#include "gradients/grad_aliasing.h"
#include "tensor_ops.h"
#include "torch_compat.h"

namespace lightning_zero {

namespace {

int64_t digest(const std::vector<int64_t>& arrivals) {
  int64_t digest = 1469598103934665603LL;
  for (auto index : arrivals)
    digest = static_cast<int64_t>((static_cast<uint64_t>(digest) ^ index) * 1099511628211ULL);
  return std::abs(digest / 2);
}

}  // namespace

RankConsensus::Result RankConsensus::agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals,
                                           int64_t barriers) {
  // Values that must be equal are sent twice, once negated: their maxima match only if all ranks agree.
  const auto order = digest(arrivals);
  const auto first = flags.size();
  const auto reads = static_cast<int64_t>(std::exchange(context_.eager_read_hash, 0) >> 2);
  flags.insert(flags.end(), {order, -order, barriers, -barriers, flag_ ? 1 : 0, reads, -reads});
  if (control_ != nullptr) {
    control_->all_reduce_max(flags, "the consensus at the end of a backward pass");
    context_.count("agreements");
    // Barriers carry no name. Ranks that passed them at different times would silently add up stale memory.
    TORCH_CHECK(flags[first + 2] == -flags[first + 3],
                "lightning_zero: an earlier backward pass was interrupted at different points on "
                "different ranks, so their gradients no longer fit together. Let the exception that "
                "interrupted it end the training on all ranks, and resume from a checkpoint.");
    // Replicas read independently of each other.
    if (!context_.replicated && flags[first + 5] != -flags[first + 6])
      raise_order_mismatch(reads);
  }
  any_flag_ = any_flag_ || flags[first + 4] != 0;
  const bool same_order = flags[first] == -flags[first + 1];
  flags.resize(first);
  return {std::move(flags), same_order};
}

// All ranks reach this point.
void RankConsensus::raise_order_mismatch(int64_t mine) {
  std::vector<int64_t> all(static_cast<size_t>(context_.size), -1);
  all[static_cast<size_t>(context_.rank)] = mine;
  control_->all_reduce_max(all, "the comparison of the order in which ranks have read weights");
  std::map<int64_t, std::string> ranks;  // by order
  for (size_t rank = 0; rank < all.size(); ++rank) {
    auto& text = ranks[all[rank]];
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  std::string groups;
  for (const auto& [order, text] : ranks) groups += (groups.empty() ? "one on " : "; another on ") + text;
  const auto text = "Eager code has read weights in different orders: " + groups +
                    ". Weights are all-gathered in order, so ranks received other weights than they "
                    "requested, and the losses and gradients of this backward pass are wrong. Every rank "
                    "must read the same modules in the same order: look for branches that depend on the data "
                    "or on the rank.";
  if (context_.watchdog)
    context_.watchdog->refuse(text);
  TORCH_CHECK(false, text);
}

void AttachedGradients::attach(const std::vector<char>& has_gradient, const DeferredGradients& deferred) {
  attached_.clear();
  const bool defers = deferred.is_on();
  for (const auto index : layout_.order()) {
    if (!has_gradient[index])
      continue;  // no rank used it: leave grad unchanged, so that weight decay skips it
    auto& record = context_.at(index);
    attached_.push_back(record.index);
    auto& current = record.param.mutable_grad();
    if (defers && !current.defined())
      record.grad.zero_();  // nothing of it has been reduced
    if (!current.defined() || current.const_data_ptr() != record.grad.const_data_ptr()) {
      auto& shown = record.visible_grad;
      if (!shown.defined() || shown.const_data_ptr() != record.grad.const_data_ptr()) {
        // Not a view for autograd: Dynamo also fakes a gradient's base, with symbolic sizes, which takes two
        // thirds of its tracing time.
        at::AutoDispatchBelowADInplaceOrView no_views;
        shown = record.grad.view(record.param.sizes());
      }
      current = shown;
    }
    if (defers)
      deferred.track(record);
  }
}

int64_t AttachedGradients::attachment_key() const {
  Lock lock(context_.mutex);
  uint64_t key = 14695981039346656037ULL;
  for (const auto& record : context_.records) {
    TORCH_CHECK_VALUE(
        !record->live || record->param.const_data_ptr() == record->shard.const_data_ptr(),
        "lightning_zero: the data of parameter ", record->name,
        " was replaced by another tensor, which gathers and optimizer steps would not use. Copy "
        "into it instead (param.data.copy_(x)), or assign to module.weight.data.");
    grad_aliasing::check_is_gradient(*record);
    const auto& grad = record->param.grad();
    key =
        (key ^ (grad.defined() ? reinterpret_cast<uintptr_t>(grad.const_data_ptr()) : 0)) * 1099511628211ULL;
  }
  return static_cast<int64_t>(key);
}

bool AttachedGradients::may_write_gradient(int64_t index) const {
  Lock lock(context_.mutex);
  const auto& record = context_.at(index);
  return !record.is_grad_aliased() || record.compute_shard.state != ComputeShardState::WEIGHT;
}

bool AttachedGradients::has_gradients() const {
  Lock lock(context_.mutex);
  return std::any_of(layout_.order().begin(), layout_.order().end(),
                     [&](int64_t i) { return context_.at(i).param.grad().defined(); });
}

std::vector<HookedGradients::Sum>::iterator HookedGradients::find(int64_t index, int backward) {
  return std::find_if(sums_.begin(), sums_.end(),
                      [&](const Sum& sum) { return sum.index == index && sum.backward == backward; });
}

void HookedGradients::add(const ParamRecord& record, const at::Tensor& grad, int backward) {
  const auto& device = record.shard.device();
  auto found = find(record.index, backward);
  if (found == sums_.end()) {
    Sum sum{backward, record.index, tensors::empty(record.numel, record.shard.options()), {}};
    sum.flat.view(grad.sizes()).copy_(grad);
    sums_.push_back(std::move(sum));
  } else {
    found->added.block(current_stream(device));
    found->flat.view(grad.sizes()).add_(grad);
    std::rotate(found, found + 1, sums_.end());
  }
  sums_.back().added.record(current_stream(device));
}

at::Tensor HookedGradients::take(const ParamRecord& record, int backward) {
  const auto found = find(record.index, backward);
  if (found == sums_.end())
    return {};
  const auto sum = std::move(*found);
  sums_.erase(found);
  sum.added.block(current_stream(record.shard.device()));
  return as_parameter(sum.flat, record);
}

std::optional<int64_t> HookedGradients::next(int backward) const {
  const auto found =
      std::find_if(sums_.begin(), sums_.end(), [&](const Sum& sum) { return sum.backward == backward; });
  return found == sums_.end() ? std::nullopt : std::optional(found->index);
}

void wrap_user_hooks(const ParamRecord& record) {
  const auto* impl = record.param.unsafeGetTensorImpl();
  const auto first = [impl, name = record.name](const at::Tensor& grad) {
    const auto ref = ShardTable::instance().find(impl->data());
    TORCH_CHECK_VALUE(
        !ref || !grad.defined(), "lightning_zero: the training step computed with this rank's shard of ",
        name,
        ", which self.parameters() and self.named_parameters() return, so each rank would get a "
        "different result. Read full weights from their modules (self.layer.weight), or use the "
        "optimizer's weight_decay for a penalty on all of them. If a function that you compiled "
        "with torch.compile reads its weights or calls its module, do not compile that function.");
    return ref && !grad.defined() ? ref->executor->gradients().take_hooked_sum(ref->index) : grad;
  };
  const auto last = [impl](const at::Tensor& grad) {
    const auto ref = ShardTable::instance().find(impl->data());
    if (!ref || !grad.defined())
      return grad;
    ref->executor->gradients().reduce_hooked(ref->index, grad);
    return at::Tensor();
  };
  compat::wrap_user_hooks(record.param, first, last);
}

namespace {

// torch.autograd.grad() and backward(inputs=...) need some gradients only, but a compiled graph passes those
// of all its weights.
bool is_wanted(const ParamRecord& record) {
  const auto wanted = compat::wanted(record.param);
  TORCH_CHECK(wanted != compat::Wanted::TO_RETURN,
              "lightning_zero: torch.autograd.grad() cannot return the gradient of ", record.name,
              ", because sharded gradients go to param.grad. Call loss.backward(), or "
              "loss.backward(inputs=[...]), and read param.grad.");
  return wanted == compat::Wanted::TO_ACCUMULATE;
}

}  // namespace

Reducer::Reducer(Context& context, Transports& transports, Communicator* control,
                 std::function<void()> on_begin)
    : context_(context),
      transports_(transports),
      on_begin_(std::move(on_begin)),
      layout_(context),
      pools_([this](at::ScalarType dtype) { return make_pool(dtype); }),
      consensus_(context, control),
      deferred_(context,
                [this] {
                  TORCH_INTERNAL_ASSERT(!backward_.goes_on());
                  begin();
                  end(/*learning=*/false);
                }),
      attached_(context, layout_) {}

std::unique_ptr<BufferPool> Reducer::make_pool(at::ScalarType dtype) const {
  const int depth = context_.options.double_buffer ? transports_.reduce().buckets_in_flight() : 1;
  return std::make_unique<BufferPool>(dtype, context_.device, static_cast<int>(context_.intra_host.size),
                                      std::max<int64_t>(layout_.row_limit(dtype), 1), depth);
}

void Reducer::join() {
  if (backward_.recorded_adding)
    return;
  const int task = compat::current_backward();
  TORCH_CHECK(task >= 0,
              "lightning_zero: a gradient arrived outside of a backward pass. Gradients must come from "
              "loss.backward().");
  auto& tasks = backward_.tasks;
  if (std::find(tasks.begin(), tasks.end(), task) != tasks.end())
    return;
  if (tasks.empty())
    begin();
  tasks.push_back(task);
  on_begin_();
}

void Reducer::begin() {
  deferred_.validate();
  backward_.arrivals.clear();
  backward_.marks.clear();
  backward_.next_launch = 0;
  backward_.segment = -1;
  transports_.reduce().begin_backward();
  prepare_layout();
}

void Reducer::prepare_layout() {
  if (layout_.is_stale()) {
    layout_.build();
    layout_.expect(pools_);
  }
}

void Reducer::open(ReduceBucket& bucket, bool adding) {
  if (bucket.state() != ReduceBucket::State::EMPTY)
    return;
  for (auto& slot : bucket.slots()) {
    if (!slot.record->grad.defined())
      slot.record->grad = tensors::zeros_like(slot.record->shard);
  }
  auto* buffer = pools_.for_dtype(bucket.dtype()).acquire(bucket.chunk(), pool_stats_);
  bucket.nan_fill = context_.options.nan_fill;
  bucket.own_send_buffers = transports_.reduce().uses_own_send_buffers();
  bucket.scale = transports_.reduce().scale(bucket.dtype());
  bucket.deferred = deferred_.is_on();
  if (bucket.nan_fill && buffer->send.defined())
    fill_with_nan(buffer->send);
  bucket.open(buffer, adding, backward_.recorded_adding);
}

void Reducer::reduce(int64_t index, const at::Tensor& grad, bool zero_copy) {
  Lock lock(context_.mutex);
  // skips autograd's dispatch, which costs time even without a graph
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto& record = context_.at(index);
  TORCH_CHECK(grad.numel() == record.numel, "lightning_zero: the gradient of ", record.name, " has shape ",
              grad.sizes(), " but the parameter has shape ", at::IntArrayRef(record.shape), ".");
  if (compat::current_backward() >= 0 && !is_wanted(record))
    return;
  if (compat::has_hooks(record.param))
    add_hooked(record, grad);
  else
    put_in_bucket(record, grad, zero_copy);
}

void Reducer::add_hooked(const ParamRecord& record, const at::Tensor& grad) {
  TORCH_CHECK_NOT_IMPLEMENTED(!backward_.recorded_adding, "a hook sees the gradient of ", record.name);
  join();
  wrap_user_hooks(record);  // again, because the user may have added hooks since
  hooked_.add(record, grad, compat::current_backward());
}

at::Tensor Reducer::take_hooked_sum(int64_t index) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  return hooked_.take(context_.at(index), compat::current_backward());
}

void Reducer::reduce_hooked(int64_t index, const at::Tensor& grad) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto& record = context_.at(index);
  put_in_bucket(record, grad.permute(record.order), /*zero_copy=*/false);
}

void Reducer::run_hooks() {
  at::NoGradGuard no_grad;
  const int task = compat::current_backward();
  while (true) {
    std::optional<int64_t> index;
    at::Tensor param;
    {
      Lock lock(context_.mutex);
      index = hooked_.next(task);
      if (!index)
        return;
      wrap_user_hooks(context_.at(*index));
      // Join the backward, or the gradients from hooks would begin another one after it.
      auto& tasks = backward_.tasks;
      if (tasks.empty())
        begin();
      if (std::find(tasks.begin(), tasks.end(), task) == tasks.end())
        tasks.push_back(task);
      param = context_.at(*index).param;
    }
    const auto left = compat::run_hooks(param);  // without the lock, as autograd does
    if (left.defined())
      reduce_hooked(*index, left);  // its hooks were removed meanwhile
  }
}

void Reducer::put_in_bucket(ParamRecord& record, const at::Tensor& grad, bool zero_copy) {
  const auto index = record.index;
  join();
  const auto position = layout_.find_position(index, backward_.next_launch);
  if (position.bucket < 0 && !record.trainable())
    return;  // requires_grad was switched off between forward and backward; torch drops such gradients too
  TORCH_CHECK(
      position.bucket >= 0, "lightning_zero: a gradient arrived for ", record.name,
      ", whose requires_grad was switched on during this backward pass. Change requires_grad between steps.");
  context_.count("reduces");
  context_.set_last_parameter(record);
  backward_.arrivals.push_back(index);
  grad_aliasing::note_arrival(record);
  if (deferred_.is_full()) {
    record.deferred.add(grad);
    return;
  }
  const bool late = position.late;
  auto& bucket = (late ? layout_.late() : layout_.buckets())[position.bucket];
  open(bucket, /*adding=*/late);
  bucket.add(position.slot, grad, zero_copy && !late);
  // If the host waits for each collective, it must not wait for peers without such gradients. Launch after
  // the consensus instead.
  if (late || context_.options.sync_collectives || !transports_.reduce().launches_early())
    return;
  launch_complete(/*may_clear_weights=*/false);
}

void Reducer::release(int64_t index) {
  Lock lock(context_.mutex);
  if (layout_.size() == 0)
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (const auto position : layout_.positions(index)) {
    auto& bucket = layout_.buckets()[position.bucket];
    if (bucket.state() != ReduceBucket::State::EMPTY)
      bucket.release(position.slot, current_stream(context_.device));
  }
}

bool Reducer::mark() {
  Lock lock(context_.mutex);
  const auto arrived = backward_.arrivals.size();
  auto& marks = backward_.marks;
  if (!backward_.goes_on() || backward_.recorded_adding || arrived == (marks.empty() ? 0 : marks.back()))
    return false;
  marks.push_back(arrived);
  return true;
}

int64_t Reducer::segment() {
  Lock lock(context_.mutex);
  return layout_.segments().identify(backward_.arrivals, backward_.marks);
}

void Reducer::launch_complete(bool may_clear_weights) {
  auto& next = backward_.next_launch;
  const auto may_launch = [&](const auto& bucket) {
    return bucket.is_complete() && (may_clear_weights || !bucket.clears_weights());
  };
  while (next < layout_.size() && may_launch(layout_.buckets()[next])) launch(next++);
}

void Reducer::launch_before(size_t bucket) {
  for (auto& next = backward_.next_launch; next < bucket; ++next) {
    open(layout_.buckets()[next], /*adding=*/false);
    launch(next);
  }
}

void Reducer::launch(size_t number, bool late) {
  auto& bucket = (late ? layout_.late() : layout_.buckets())[number];
  bucket.seal([&](const auto& slot) {
    return late || backward_.recorded_adding ||
           layout_.was_launched(slot.record->index, static_cast<int64_t>(number));
  });
  for (auto& slot : bucket.slots()) grad_aliasing::begin_gradient(*slot.record, context_.device);
  if (!late && std::exchange(backward_.segment, bucket.segment()) != bucket.segment())
    transports_.reduce().begin_segment();
  context_.count("flushes");
  context_.count("reduce_bytes", context_.intra_host.size * bucket.chunk() *
                                     static_cast<int64_t>(c10::elementSize(bucket.dtype())));
  transports_.reduce().reduce(bucket);
}

// Devices wait for their peers' contributions to launched buckets, and this rank's host may wait for its
// device before the consensus (kernel autotuning, freeing memory, a hook that reads a value). So a peer's
// device must not wait for a launch after the consensus. A rank without gradients sends zeros instead.
void Reducer::launch_before_consensus() {
  if (!has_streams(context_.device) || context_.options.sync_collectives || context_.size == 1)
    return;
  launch_before(layout_.size());
}

RankConsensus::Result Reducer::agree() {
  // Per slot of each bucket: 1 for a gradient, 2 for one that arrived after its bucket was launched, or a
  // deferred one that a replayed graph did not send.
  std::vector<int64_t> flags;
  const bool defers = deferred_.is_on();
  for (size_t b = 0; b < layout_.size(); ++b) {
    auto &bucket = layout_.buckets()[b], &late = layout_.late()[b];
    for (size_t s = 0; s < bucket.slots().size(); ++s) {
      const bool is_late = late.state() == ReduceBucket::State::FILLING && late.slots()[s].arrivals > 0;
      const auto& slot = bucket.slots()[s];
      const bool waits = !defers && !slot.repeated && slot.record->deferred.filled;
      const bool was_left = waits && bucket.state() == ReduceBucket::State::LAUNCHED;
      flags.push_back(is_late || was_left ? 2 : slot.arrivals > 0 || waits ? 1 : 0);
    }
  }
  auto order = backward_.arrivals;
  for (const auto mark : backward_.marks) order.push_back(-1 - static_cast<int64_t>(mark));
  return consensus_.agree(std::move(flags), order, transports_.reduce().barriers_before());
}

void Reducer::end_backward() {
  run_hooks();
  {
    Lock lock(context_.mutex);
    at::NoGradGuard no_grad;
    // A backward inside this one has ended (reentrant activation checkpointing), and no gradient arrived
    // since. Other ranks may have gradients.
    if (backward_.tasks.empty())
      begin();
    before_end_(!backward_.arrivals.empty());
    if (!deferred_.is_full())
      launch_before_consensus();
    end(/*learning=*/true);
    ++completed_backwards_;
  }
  // Without the lock: hooks are Python code and may gather.
  if (!end_hook_op_.empty())
    compat::call(end_hook_op_);
}

void Reducer::end_empty_backward() {
  TORCH_CHECK(!backward_.goes_on(), "lightning_zero: a backward pass with gradients is running.");
  end_backward();
}

void Reducer::end(bool learning) {
  std::vector<char> has_gradient(context_.records.size(), 0);
  if (deferred_.is_full()) {
    for (const auto index : backward_.arrivals) has_gradient[index] = 1;
    attached_.attach(has_gradient, deferred_);
    return finish();
  }
  const auto agreed = agree();
  std::vector<int64_t> wanted(layout_.size(), 0);
  auto flag = agreed.flags.begin();
  for (size_t b = 0; b < layout_.size(); ++b) {
    for (const auto& slot : layout_.buckets()[b].slots()) {
      if (*flag > 0)
        has_gradient[slot.record->index] = 1;
      wanted[b] = std::max(wanted[b], *flag++);
    }
  }
  launch_wanted(wanted);
  deferred_.finish_reduction();
  attached_.attach(has_gradient, deferred_);
  if (learning)
    layout_.learn(backward_.arrivals, backward_.marks, agreed.same_order);
  finish();
}

// By bucket: 1 to launch it, 2 to launch its late bucket too.
void Reducer::launch_wanted(const std::vector<int64_t>& wanted) {
  for (size_t b = backward_.next_launch; b < wanted.size(); ++b) {
    if (wanted[b] == 0)
      continue;
    open(layout_.buckets()[b], /*adding=*/false);
    launch(b);
  }
  for (size_t b = 0; b < wanted.size(); ++b) {
    if (wanted[b] < 2)
      continue;
    open(layout_.late()[b], /*adding=*/true);
    launch(b, /*late=*/true);
    context_.count("late_flushes");
  }
  pools_.drain();
}

void Reducer::finish() {
  layout_.reset();
  backward_.tasks.clear();
  backward_.next_launch = 0;
  grad_aliasing::end_backward(context_);
  if (context_.options.free_buckets)
    release_buffers();
}

void Reducer::abort() {
  hooked_.clear();
  if (!backward_.goes_on())
    return;
  transports_.release_barriers();  // peers may have been interrupted at another point
  pools_.discard();
  layout_.reset();
  backward_.tasks.clear();
  backward_.next_launch = 0;
  grad_aliasing::end_backward(context_);
  deferred_.abort();
  context_.count("aborted_backwards");
}

void Reducer::release_buffers() {
  Lock lock(context_.mutex);
  pools_.release();
}

void Reducer::add_counters(std::map<std::string, int64_t>& counters) const {
  counters["grown_buckets"] = pool_stats_.grown;
  counters["allocated_buckets"] = pool_stats_.allocated;
  counters["bucket_bytes"] = pools_.bytes();
  counters["buckets"] = static_cast<int64_t>(layout_.size());
}

void Reducer::close() {
  layout_.close();
  pools_.clear();
  hooked_.clear();
  attached_.close();
}

}  // namespace lightning_zero
