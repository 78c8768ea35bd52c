#include "gradients/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/compat.h"

namespace lightning_zero {

namespace {

// torch.autograd.grad() and backward(inputs=...) are after the gradients of some tensors only, but a compiled
// graph hands over those of all its weights.
bool is_wanted(const ParamRecord& record) {
  const auto wanted = compat::wanted(record.param);
  TORCH_CHECK(wanted != compat::Wanted::TO_RETURN,
              "lightning_zero: torch.autograd.grad() cannot return the gradient of ", record.name,
              ", because sharded gradients go to param.grad. Call loss.backward(), or "
              "loss.backward(inputs=[...]), and read param.grad.");
  return wanted == compat::Wanted::TO_ACCUMULATE;
}

}  // namespace

Reducer::Reducer(Context& context, Transports& transports, Communicator* control, std::function<void()> begun)
    : context_(context),
      transports_(transports),
      begun_(std::move(begun)),
      layout_(context),
      pools_([this](at::ScalarType dtype) { return make_pool(dtype); }),
      agreement_(context, control),
      attached_(context, layout_) {}

std::unique_ptr<BufferPool> Reducer::make_pool(at::ScalarType dtype) const {
  const int depth = context_.options.double_buffer ? transports_.reduce().buckets_in_flight() : 1;
  return std::make_unique<BufferPool>(dtype, context_.device, static_cast<int>(context_.size),
                                      std::max<int64_t>(layout_.row_limit(dtype), 1), depth);
}

void Reducer::forget_buckets() {
  pools_.release();
  pools_.clear();
  layout_.forget();
}

void Reducer::renew_pools() {
  pools_.clear();
  layout_.expect(pools_);
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
  begun_();
}

void Reducer::begin() {
  backward_.arrivals.clear();
  backward_.next_launch = 0;
  transports_.reduce().begin_backward();
  if (layout_.is_stale()) {
    layout_.make();
    layout_.expect(pools_);
  }
}

void Reducer::open(ReduceBucket& bucket, bool adding) {
  if (bucket.state() != ReduceBucket::State::EMPTY)
    return;
  for (auto& slot : bucket.slots()) {
    if (!slot.record->grad.defined())
      slot.record->grad = at::zeros_like(slot.record->shard);
  }
  auto* buffer = pools_.of(bucket.dtype()).acquire(bucket.chunk(), pool_stats_);
  bucket.poison = context_.options.poison;
  bucket.own_send_buffers = transports_.reduce().wants_own_send_buffers();
  bucket.scale = transports_.reduce().scale();
  if (bucket.poison && buffer->send.defined())
    fill_with_poison(buffer->send);
  bucket.open(buffer, adding, backward_.recorded_adding);
}

void Reducer::reduce(int64_t index, const at::Tensor& grad, bool borrow) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;  // and not only no graph: the way through it takes time
  auto& record = context_.at(index);
  TORCH_CHECK(grad.numel() == record.numel, "lightning_zero: the gradient of ", record.name, " has shape ",
              grad.sizes(), " but the parameter has shape ", at::IntArrayRef(record.shape), ".");
  if (compat::current_backward() >= 0 && !is_wanted(record))
    return;
  join();
  const auto position = layout_.position(index);
  TORCH_CHECK(
      position.bucket >= 0, "lightning_zero: a gradient arrived for ", record.name,
      ", whose requires_grad was switched on during this backward pass. Change requires_grad between steps.");
  context_.count("reduces");
  context_.touch(record);
  backward_.arrivals.push_back(index);
  const bool late = layout_.buckets()[position.bucket].state() == ReduceBucket::State::LAUNCHED;
  auto& bucket = (late ? layout_.late() : layout_.buckets())[position.bucket];
  open(bucket, /*adding=*/late);
  bucket.put(position.slot, grad, borrow && !late);
  // When the host waits for each collective, it must not wait for peers that have no such gradient: launch
  // after the agreement.
  const auto& next = backward_.next_launch;
  if (!late && next < layout_.buckets().size() && layout_.buckets()[next].complete() &&
      !context_.options.sync_collectives && transports_.reduce().leaves_early())
    launch_complete();
}

void Reducer::release(int64_t index) {
  Lock lock(context_.mutex);
  const auto position = layout_.position(index);
  if (position.bucket < 0 || layout_.is_empty())
    return;
  auto& bucket = layout_.buckets()[position.bucket];
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (bucket.state() != ReduceBucket::State::EMPTY)
    bucket.release(position.slot, current_stream(context_.device));
}

void Reducer::launch_complete() {
  auto& buckets = layout_.buckets();
  auto& next = backward_.next_launch;
  while (next < buckets.size() && buckets[next].complete()) launch(buckets[next++]);
}

void Reducer::launch(ReduceBucket& bucket) {
  bucket.seal();
  context_.count("flushes");
  context_.count("reduce_bytes",
                 context_.size * bucket.chunk() * static_cast<int64_t>(c10::elementSize(bucket.dtype())));
  transports_.reduce().reduce(bucket);
}

// Devices wait for their peers' parts of what has left, and this rank's host may wait for its device (a
// kernel is tuned at its first run, memory is freed, a hook reads a value), and then does not come to the
// agreement. So nothing that a peer's device waits for may come after it: a rank that lacks gradients sends
// zeros instead.
void Reducer::launch_all() {
  if (!has_streams(context_.device) || context_.options.sync_collectives || context_.size == 1)
    return;
  for (auto& next = backward_.next_launch; next < layout_.buckets().size(); ++next) {
    open(layout_.buckets()[next], /*adding=*/false);
    launch(layout_.buckets()[next]);
  }
}

Agreement::Agreed Reducer::agree() {
  // Per trainable parameter: 1 a gradient arrived, 2 one arrived after its bucket had left.
  const auto& order = layout_.order();
  std::vector<int64_t> flags(order.size(), 0);
  for (size_t i = 0; i < order.size(); ++i) {
    const auto position = layout_.position(order[i]);
    auto& late = layout_.late()[position.bucket];
    if (layout_.slot(position).arrivals > 0)
      flags[i] = 1;
    if (late.state() == ReduceBucket::State::FILLING && late.slots()[position.slot].arrivals > 0)
      flags[i] = 2;
  }
  return agreement_.agree(std::move(flags), backward_.arrivals, transports_.reduce().barriers_before());
}

void Reducer::end_backward() {
  {
    Lock lock(context_.mutex);
    at::NoGradGuard no_grad;
    // A backward inside this one has ended since (reentrant activation checkpointing), and nothing has come
    // after it. Other ranks may have gradients.
    if (backward_.tasks.empty())
      begin();
    launch_all();
    const auto agreed = agree();
    auto &buckets = layout_.buckets(), &late = layout_.late();
    std::vector<int64_t> wanted(buckets.size(), 0);
    for (size_t i = 0; i < layout_.order().size(); ++i) {
      auto& most = wanted[layout_.position(layout_.order()[i]).bucket];
      most = std::max(most, agreed.flags[i]);
    }
    for (size_t b = backward_.next_launch; b < buckets.size(); ++b) {
      if (wanted[b] == 0)
        continue;
      open(buckets[b], /*adding=*/false);
      launch(buckets[b]);
    }
    for (size_t b = 0; b < buckets.size(); ++b) {
      if (wanted[b] < 2)
        continue;
      open(late[b], /*adding=*/true);
      launch(late[b]);
      context_.count("late_flushes");
    }
    pools_.drain();
    attached_.attach(agreed.flags);
    layout_.learn(backward_.arrivals, agreed.same_order);
    finish();
    ++backwards_;
  }
  // Without the lock: hooks are Python, and may gather.
  if (!end_op_.empty())
    compat::call(end_op_);
}

void Reducer::finish() {
  layout_.reset();
  backward_.tasks.clear();
  backward_.next_launch = 0;
  if (context_.options.free_buckets)
    release_buffers();
}

void Reducer::abort() {
  if (!in_backward())
    return;
  transports_.interrupt();  // peers may have been interrupted elsewhere
  pools_.discard();
  layout_.reset();
  backward_.tasks.clear();
  backward_.next_launch = 0;
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
  attached_.close();
}

}  // namespace lightning_zero
