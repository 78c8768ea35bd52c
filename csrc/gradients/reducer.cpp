#include "gradients/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "over_copies.h"
#include "runtime/compat.h"
#include "runtime/tensors.h"

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
      deferred_(context,
                [this] {
                  TORCH_INTERNAL_ASSERT(!backward_.goes_on());
                  begin();
                  end(/*learning=*/false);
                }),
      attached_(context, layout_) {}

std::unique_ptr<BufferPool> Reducer::make_pool(at::ScalarType dtype) const {
  const int depth = context_.options.double_buffer ? transports_.reduce().buckets_in_flight() : 1;
  return std::make_unique<BufferPool>(dtype, context_.device, static_cast<int>(context_.inside.size),
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
  begun_();
}

void Reducer::begin() {
  deferred_.look();
  backward_.arrivals.clear();
  backward_.marks.clear();
  backward_.next_launch = 0;
  backward_.segment = -1;
  transports_.reduce().begin_backward();
  prepare_layout();
}

void Reducer::prepare_layout() {
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
      slot.record->grad = tensors::zeros_like(slot.record->shard);
  }
  auto* buffer = pools_.of(bucket.dtype()).acquire(bucket.chunk(), pool_stats_);
  bucket.poison = context_.options.poison;
  bucket.own_send_buffers = transports_.reduce().wants_own_send_buffers();
  bucket.scale = transports_.reduce().scale(bucket.dtype());
  bucket.deferred = deferred_.is_on();
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
  if (compat::has_hooks(record.param))
    hold(record, grad);
  else
    take(record, grad, borrow);
}

void Reducer::hold(const ParamRecord& record, const at::Tensor& grad) {
  TORCH_CHECK_NOT_IMPLEMENTED(!backward_.recorded_adding, "a hook sees the gradient of ", record.name);
  join();
  surround_hooks(record);  // of those to come: the user's may be newer than ours
  held_.add(record, grad, compat::current_backward());
}

at::Tensor Reducer::take_held(int64_t index) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  return held_.take(context_.at(index), compat::current_backward());
}

void Reducer::reduce_hooked(int64_t index, const at::Tensor& grad) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto& record = context_.at(index);
  take(record, grad.permute(record.order), /*borrow=*/false);
}

void Reducer::run_hooks() {
  at::NoGradGuard no_grad;
  const int task = compat::current_backward();
  while (true) {
    std::optional<int64_t> index;
    at::Tensor param;
    {
      Lock lock(context_.mutex);
      index = held_.next(task);
      if (!index)
        return;
      surround_hooks(context_.at(*index));
      // Or what hooks bring would begin another round, after the one that ends now.
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

void Reducer::take(ParamRecord& record, const at::Tensor& grad, bool borrow) {
  const auto index = record.index;
  join();
  const auto position = layout_.place(index, backward_.next_launch);
  if (position.bucket < 0 && !record.trainable())
    return;  // switched off between forward and backward: torch accumulates no such gradient, either
  TORCH_CHECK(
      position.bucket >= 0, "lightning_zero: a gradient arrived for ", record.name,
      ", whose requires_grad was switched on during this backward pass. Change requires_grad between steps.");
  context_.count("reduces");
  context_.touch(record);
  backward_.arrivals.push_back(index);
  if (deferred_.is_whole()) {
    record.deferred.add(grad);
    return;
  }
  const bool late = position.late;
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

void Reducer::launch_complete() {
  auto& next = backward_.next_launch;
  while (next < layout_.size() && layout_.buckets()[next].complete()) launch(next++);
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
  for (auto& slot : bucket.slots()) over_copies::arrive(*slot.record, context_.device);
  if (!late && std::exchange(backward_.segment, bucket.segment()) != bucket.segment())
    transports_.reduce().begin_segment();
  context_.count("flushes");
  context_.count("reduce_bytes", context_.inside.size * bucket.chunk() *
                                     static_cast<int64_t>(c10::elementSize(bucket.dtype())));
  transports_.reduce().reduce(bucket);
}

// Devices wait for their peers' parts of what has left, and this rank's host may wait for its device (a
// kernel is tuned at its first run, memory is freed, a hook reads a value), and then does not come to the
// agreement. So nothing that a peer's device waits for may come after it: a rank that lacks gradients sends
// zeros instead.
void Reducer::launch_all() {
  if (!has_streams(context_.device) || context_.options.sync_collectives || context_.size == 1)
    return;
  launch_before(layout_.size());
}

Agreement::Agreed Reducer::agree() {
  // Per slot of each bucket: 1 a gradient is there, 2 one that came after the bucket had left, or that waits
  // from earlier backwards and that a replayed graph did not take along.
  std::vector<int64_t> flags;
  const bool defers = deferred_.is_on();
  for (size_t b = 0; b < layout_.size(); ++b) {
    auto &bucket = layout_.buckets()[b], &late = layout_.late()[b];
    for (size_t s = 0; s < bucket.slots().size(); ++s) {
      const bool is_late = late.state() == ReduceBucket::State::FILLING && late.slots()[s].arrivals > 0;
      const auto& slot = bucket.slots()[s];
      const bool waits = !defers && !slot.again && slot.record->deferred.filled;
      const bool was_left = waits && bucket.state() == ReduceBucket::State::LAUNCHED;
      flags.push_back(is_late || was_left ? 2 : slot.arrivals > 0 || waits ? 1 : 0);
    }
  }
  auto order = backward_.arrivals;
  for (const auto mark : backward_.marks) order.push_back(-1 - static_cast<int64_t>(mark));
  return agreement_.agree(std::move(flags), order, transports_.reduce().barriers_before());
}

void Reducer::end_backward() {
  run_hooks();
  {
    Lock lock(context_.mutex);
    at::NoGradGuard no_grad;
    // A backward inside this one has ended since (reentrant activation checkpointing), and nothing has come
    // after it. Other ranks may have gradients.
    if (backward_.tasks.empty())
      begin();
    before_end_(!backward_.arrivals.empty());
    if (!deferred_.is_whole())
      launch_all();
    end(/*learning=*/true);
    ++backwards_;
  }
  // Without the lock: hooks are Python, and may gather.
  if (!end_op_.empty())
    compat::call(end_op_);
}

void Reducer::end_empty_backward() {
  TORCH_CHECK(!backward_.goes_on(), "lightning_zero: a backward pass goes on, and brings gradients.");
  end_backward();
}

void Reducer::end(bool learning) {
  std::vector<char> brought(context_.records.size(), 0);
  if (deferred_.is_whole()) {
    for (const auto index : backward_.arrivals) brought[index] = 1;
    attached_.attach(brought, deferred_);
    return finish();
  }
  const auto agreed = agree();
  std::vector<int64_t> wanted(layout_.size(), 0);
  auto flag = agreed.flags.begin();
  for (size_t b = 0; b < layout_.size(); ++b) {
    for (const auto& slot : layout_.buckets()[b].slots()) {
      if (*flag > 0)
        brought[slot.record->index] = 1;
      wanted[b] = std::max(wanted[b], *flag++);
    }
  }
  launch_agreed(wanted);
  deferred_.are_reduced();
  attached_.attach(brought, deferred_);
  if (learning)
    layout_.learn(backward_.arrivals, backward_.marks, agreed.same_order);
  finish();
}

// By bucket: 1 what has not left yet, 2 what came after it had.
void Reducer::launch_agreed(const std::vector<int64_t>& wanted) {
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
  over_copies::have_arrived(context_);
  if (context_.options.free_buckets)
    release_buffers();
}

void Reducer::abort() {
  held_.clear();
  if (!backward_.goes_on())
    return;
  transports_.interrupt();  // peers may have been interrupted elsewhere
  pools_.discard();
  layout_.reset();
  backward_.tasks.clear();
  backward_.next_launch = 0;
  over_copies::have_arrived(context_);
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
  held_.clear();
  attached_.close();
}

}  // namespace lightning_zero
