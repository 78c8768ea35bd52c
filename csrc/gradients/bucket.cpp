#include "gradients/bucket.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tensor_ops.h"

namespace lightning_zero {

namespace {

void add_mean(at::Tensor to, const at::Tensor& rows, bool add, const RowMeans& mean) {
  if (mean(to, rows, add))
    return;
  const auto wide = c10::promoteTypes(to.scalar_type(), at::kFloat);
  if (!add && to.scalar_type() == wide)
    return tensors::mean_of_rows(to, rows, wide);
  const auto from = tensors::mean_of_rows(rows, wide);
  add ? to.add_(from) : to.copy_(from);
}

void add_product(at::Tensor to, const at::Tensor& from, double factor, bool add) {
  int exponent = 0;
  if (factor == 1.0) {
    add ? to.add_(from) : to.copy_(from);
  } else if (std::frexp(factor, &exponent) == 0.5) {
    // One kernel. Rounding to a narrow dtype is exact for powers of two.
    if (add)
      to.add_(from, factor);
    else
      tensors::multiply(to, from, tensors::scalar(factor));
  } else {
    const auto wide = c10::promoteTypes(to.scalar_type(), at::kFloat);
    const bool there = !add && to.scalar_type() == wide;
    auto product = there ? to : tensors::empty(to.numel(), to.options().dtype(wide));
    tensors::multiply(product, product.copy_(from), tensors::scalar(factor));
    if (!there)
      add ? to.add_(product) : to.copy_(product);
  }
}

}  // namespace

ApplySum make_row_mean(at::Tensor rows, int64_t begin, const RowMeans& mean) {
  return [rows = std::move(rows), begin, &mean](const at::Tensor& to, int64_t from, bool add) {
    add_mean(to, rows.narrow(1, from - begin, to.numel()), add, mean);
  };
}

ApplySum make_product(at::Tensor sums, double factor) {
  return [sums = std::move(sums), factor](const at::Tensor& to, int64_t begin, bool add) {
    add_product(to, flat_range(sums, begin, to.numel()), factor, add);
  };
}

namespace {

// Maximum wait of the host for a reduce-scatter that a peer has not joined, before it allocates another
// buffer.
constexpr std::chrono::milliseconds kPeerWait{2000};
// for a buffer that has already exceeded kPeerWait
constexpr std::chrono::milliseconds kRepeatedPeerWait{100};

}  // namespace

BufferPool::BufferPool(at::ScalarType dtype, const c10::Device& device, int ranks, int64_t capacity,
                       int depth)
    : dtype_(dtype), device_(device), ranks_(ranks), capacity_(capacity), depth_(depth) {}

BucketBuffer* BufferPool::grow(int64_t chunk, PoolStats& stats) {
  if (chunk > capacity_ || buffers_.size() >= depth_)
    ++stats.grown;
  ++stats.allocated;
  auto buffer = std::make_unique<BucketBuffer>();
  buffer->capacity = std::max(chunk, expected_);
  buffer->filling = true;
  buffers_.push_back(std::move(buffer));
  return buffers_.back().get();
}

BucketBuffer* BufferPool::acquire(int64_t chunk, PoolStats& stats) {
  if (buffers_.size() < depth_)
    return grow(chunk, stats);
  auto oldest = std::find_if(buffers_.begin(), buffers_.end(), [](const auto& b) { return !b->filling; });
  if (oldest == buffers_.end())
    return grow(chunk, stats);
  // Wait long for a slow peer once, not for each buffer.
  const auto limit = oldest->get() == slow_buffer_ ? kRepeatedPeerWait : kPeerWait;
  slow_buffer_ = (*oldest)->pending.ready_within(limit) ? nullptr : oldest->get();
  if (slow_buffer_ != nullptr)
    return grow(chunk, stats);
  (*oldest)->pending.wait(device_);
  (*oldest)->own_send_buffers.clear();
  if ((*oldest)->capacity < chunk) {
    // The wait above ordered the last use of the old memory before this point, so it can be replaced.
    buffers_.erase(oldest);
    return grow(chunk, stats);
  }
  auto buffer = std::move(*oldest);
  buffers_.erase(oldest);
  buffer->filling = true;
  buffers_.push_back(std::move(buffer));
  return buffers_.back().get();
}

void BufferPool::drain() {
  for (auto& buffer : buffers_) {
    if (!buffer->filling) {
      buffer->pending.wait(device_);
      buffer->own_send_buffers.clear();
    }
  }
}

void BufferPool::release() {
  drain();
  buffers_.clear();
}

void BufferPool::discard() {
  for (auto& buffer : buffers_) {
    buffer->pending.drop_continuation();
    if (has_streams(device_)) {
      try {
        buffer->pending.wait(device_);  // it may still read zero-copy gradients
      } catch (const std::exception&) {
        // The device failed, so nothing reads the buffer.
      }
    }
    buffer->own_send_buffers.clear();
    buffer->filling = false;
  }
}

int64_t BufferPool::bytes() const {
  int64_t total = 0;
  for (const auto& buffer : buffers_) {
    for (const auto& tensor : {buffer->send, buffer->recv, buffer->host_sums})
      total += tensor.defined() ? tensor.nbytes() : 0;
  }
  return total;
}

BufferPool& BufferPools::for_dtype(at::ScalarType dtype) {
  auto& pool = pools_[static_cast<int>(dtype)];
  if (!pool)
    pool = make_(dtype);
  return *pool;
}

void BufferPools::drain() {
  for (auto& [dtype, pool] : pools_) pool->drain();
}

void BufferPools::release() {
  for (auto& [dtype, pool] : pools_) pool->release();
}

void BufferPools::discard() {
  for (auto& [dtype, pool] : pools_) pool->discard();
}

int64_t BufferPools::bytes() const {
  int64_t total = 0;
  for (const auto& [dtype, pool] : pools_) total += pool->bytes();
  return total;
}

namespace {

const char* name(ReduceBucket::State state) {
  switch (state) {
    case ReduceBucket::State::EMPTY:
      return "EMPTY";
    case ReduceBucket::State::FILLING:
      return "FILLING";
    case ReduceBucket::State::LAUNCHED:
      return "LAUNCHED";
  }
  return "?";
}

}  // namespace

void ReduceBucket::append(ParamRecord* record, int expected, bool repeated) {
  TORCH_INTERNAL_ASSERT(state_ == State::EMPTY);
  slots_.push_back(Slot{record, chunk_, 0, expected, false, repeated});
  chunk_ += record->host_shard_numel();
}

void ReduceBucket::mark_launched() {
  TORCH_INTERNAL_ASSERT(state_ == State::EMPTY, "cannot mark a bucket as launched that is ", name(state_),
                        "");
  state_ = State::LAUNCHED;
  sent_.assign(slots_.size(), Sent{});
}

void ReduceBucket::open(BucketBuffer* buffer, bool adding, std::optional<bool> decided) {
  TORCH_INTERNAL_ASSERT(state_ == State::EMPTY, "cannot open a bucket that is ", name(state_));
  state_ = State::FILLING;
  buffer_ = buffer;
  sent_.assign(slots_.size(), Sent{});
  for (auto& slot : slots_) {
    auto& record = *slot.record;
    if (decided && !adding) {
      slot.add = *decided;
      continue;
    }
    slot.add = adding || record.param.grad().defined();
    if (!adding && !slot.repeated)
      record.accept_user_gradient();
  }
}

at::Tensor& ReduceBucket::memory(at::Tensor& tensor, int64_t numel, at::ScalarType dtype) {
  if (!tensor.defined()) {
    const auto& shard = slots_.front().record->shard;
    tensor = tensors::empty(numel, shard.options().dtype(dtype).requires_grad(std::nullopt));
    if (nan_fill)
      fill_with_nan(tensor);
  }
  return tensor;
}

void ReduceBucket::add(size_t index, const at::Tensor& grad, bool zero_copy) {
  TORCH_INTERNAL_ASSERT(state_ == State::FILLING, "cannot add a gradient to a bucket that is ", name(state_));
  materialize(index);
  auto& slot = slots_[index];
  auto& sent = sent_[index];
  const bool first = slot.arrivals++ == 0 || std::exchange(sent.in_deferred, false);
  if (slot.takes_deferred()) {
    slot.record->deferred.add(grad);
    sent.in_deferred = true;
  } else if (!first) {
    send_slice(index).narrow(0, 0, grad.numel()).view(grad.sizes()).add_(grad, scale);
  } else if (zero_copy && own_send_buffers && scale == 1.0 && grad.scalar_type() == dtype_ &&
             !grad.is_conj() && !grad.is_neg() && grad.is_contiguous() &&
             grad.numel() == ranks_ * slot.record->host_shard_numel()) {
    sent = {grad.view({-1}), /*zero_copy=*/true};
  } else {
    copy_in(index, grad);
  }
}

void ReduceBucket::materialize(size_t index) {
  if (sent_[index].zero_copy)
    copy_in(index, std::exchange(sent_[index], {}).flat);
}

void ReduceBucket::release(size_t index, const c10::Stream& stream) {
  if (state_ == State::FILLING) {
    materialize(index);
  } else if (sent_[index].zero_copy) {
    read_.block(stream);
    sent_[index] = {};
  }
}

void ReduceBucket::record_read(const c10::Stream& stream) {
  read_.record(stream);
  for (auto& sent : sent_) {
    if (sent.flat.defined() && !sent.zero_copy)
      buffer_->own_send_buffers.push_back(std::move(sent.flat));
  }
}

void ReduceBucket::copy_in(size_t index, const at::Tensor& grad) {
  const auto& slot = slots_[index];
  const auto& record = *slot.record;
  // Copy in the gradient's own shape, so that a transposed view is copied once and not flattened first.
  auto slice = send_slice(index);
  auto filled = flat_range(slice, 0, record.numel).view(grad.sizes());
  if (scale == 1.0) {
    filled.copy_(grad);
  } else if (filled.element_size() > grad.element_size()) {
    filled.copy_(grad).mul_(scale);  // scaling in the narrow dtype would round twice
  } else {
    // 1/3 in bfloat16 has a systematic error of 0.2%. A 0-dim double tensor does not change the result dtype.
    if (!scale_.defined())
      scale_ = tensors::scalar(scale);
    tensors::multiply(filled, grad, scale_);
  }
  // Stale values in the padding would reach the last ranks' shards and the gradient norm.
  const auto padding = ranks_ * record.host_shard_numel() - record.numel;
  if (padding > 0)
    flat_range(slice, record.numel, padding).zero_();
}

at::Tensor ReduceBucket::send_slice(size_t index) {
  const auto& slot = slots_[index];
  const auto length = ranks_ * slot.record->host_shard_numel();
  if (!own_send_buffers)
    return flat_range(memory(buffer_->send, ranks_ * buffer_->capacity), ranks_ * slot.offset, length);
  return memory(sent_[index].flat, length);
}

bool ReduceBucket::is_complete() const {
  if (state_ != State::FILLING)
    return false;
  bool any = false;
  for (const auto& slot : slots_) {
    if (slot.arrivals < slot.expected)
      return false;
    any = any || slot.arrivals > 0;
  }
  return any;
}

bool ReduceBucket::clears_weights() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const auto& slot) { return slot.arrivals == 0 && slot.record->is_grad_aliased(); });
}

void ReduceBucket::seal(const std::function<bool(const Slot&)>& has_more) {
  TORCH_INTERNAL_ASSERT(state_ == State::FILLING, "cannot launch a bucket that is ", name(state_));
  for (auto& slot : slots_) {
    if (!slot.repeated)
      continue;
    if (has_more(slot))
      slot.add = true;
    else
      slot.record->accept_user_gradient();
  }
  for (size_t index = 0; index < slots_.size(); ++index) {
    auto& slot = slots_[index];
    if (slot.takes_deferred()) {
      auto& sum = slot.record->deferred;
      copy_in(index, sum.values(slot.record->numel));
      sum.clear();
    } else if (slot.arrivals == 0 || sent_[index].in_deferred) {
      send_slice(index).zero_();
    }
  }
  state_ = State::LAUNCHED;
  buffer_->filling = false;
}

void ReduceBucket::accumulate(int64_t begin, int64_t width, const ApplySum& sums, bool inter_host) {
  if (hosts_ == 1 || inter_host)
    apply_to_runs(begin, width, sums, slots_.front().record->deferred.shards,
                  [](Slot& slot) { return Target{slot.record->grad, &slot.add}; });
  else if (deferred)
    apply_to_runs(begin, width, sums, 1, [](Slot& slot) {
      auto& sum = slot.record->deferred;
      return Target{sum.memory, &sum.filled};
    });
  else
    sums(flat_range(fp32_memory(), begin, width), begin, /*add=*/false);
}

void ReduceBucket::accumulate_sent() {
  TORCH_INTERNAL_ASSERT(ranks_ == 1 && hosts_ == 1 && !deferred);
  std::vector<at::Tensor> written, values, summed, addends;
  for (size_t index = 0; index < slots_.size(); ++index) {
    auto& slot = slots_[index];
    const bool add = std::exchange(slot.add, true);
    (add ? summed : written).push_back(slot.record->grad);
    (add ? addends : values).push_back(send_slice(index));
  }
  if (!written.empty())
    tensors::copy_each(written, values);
  if (!summed.empty())
    tensors::add_each(summed, addends);
}

at::Tensor ReduceBucket::sum_on_host() {
  std::vector<at::Tensor> to, from;
  auto sums = fp32_memory();
  for (auto& slot : slots_) {
    auto& sum = slot.record->deferred;
    if (sum.filled && !sum.full) {
      to.push_back(flat_range(sums, slot.offset, slot.record->host_shard_numel()));
      from.push_back(sum.memory);
      sum.clear();
    }
  }
  if (!to.empty())
    tensors::add_each(to, from);
  return sums;
}

at::Tensor ReduceBucket::fp32_memory() {
  const auto wide = c10::promoteTypes(dtype_, at::kFloat);
  return flat_range(memory(buffer_->host_sums, buffer_->capacity, wide), 0, chunk_);
}

// `parts`: the ratio of a slot's size to its contribution.
template <class Find>
void ReduceBucket::apply_to_runs(int64_t begin, int64_t width, const ApplySum& sums, int64_t parts,
                                 Find&& target) {
  const auto end = begin + width;
  const auto offset = [&](const Slot& slot) { return slot.offset / parts; };
  const auto numel = [&](const Slot& slot) { return slot.record->host_shard_numel() / parts; };
  // Return the slice of a slot's target between `begin` and `end`.
  const auto within = [&](Slot& slot) {
    const auto from = std::max(begin, offset(slot));
    const auto to = std::min(end, offset(slot) + numel(slot));
    return from < to ? flat_range(target(slot).memory, from - offset(slot), to - from) : at::Tensor();
  };
  // Slots that are adjacent in the bucket are usually adjacent in the flat gradient buffer too. Use one
  // kernel per contiguous run.
  for (size_t first = 0; first < slots_.size();) {
    auto& head = slots_[first];
    auto into = within(head);
    if (!into.defined()) {
      ++first;
      continue;
    }
    const bool add = *target(head).add;
    const auto* expected_next = static_cast<const char*>(into.const_data_ptr()) + into.nbytes();
    auto length = into.numel();
    size_t next = first + 1;
    for (; next < slots_.size(); ++next) {
      const auto other = within(slots_[next]);
      if (!other.defined() || other.const_data_ptr() != expected_next || *target(slots_[next]).add != add ||
          !other.is_alias_of(into)) {
        break;
      }
      expected_next += other.nbytes();
      length += other.numel();
    }
    sums(into.as_strided({length}, {1}), std::max(begin, offset(head)), add);
    first = next;
  }
  for (auto& slot : slots_) {
    if (offset(slot) + numel(slot) <= end)
      *target(slot).add = true;
  }
}

void ReduceBucket::reset() {
  state_ = State::EMPTY;
  buffer_ = nullptr;
  sent_.clear();
  for (auto& slot : slots_) slot.arrivals = 0;
}

}  // namespace lightning_zero
