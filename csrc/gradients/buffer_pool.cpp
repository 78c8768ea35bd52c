#include "gradients/buffer_pool.h"

#include <algorithm>
#include <chrono>

namespace lightning_zero {

namespace {

// How long a host may wait for a reduce-scatter that some peer has not joined before it takes new memory.
constexpr std::chrono::milliseconds kPeerWait{2000};
constexpr std::chrono::milliseconds kRepeatedPeerWait{100};  // with one that has been waited for so long

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
  // A peer that has not come is waited for at length once, and not again for each buffer.
  const auto limit = oldest->get() == slow_buffer_ ? kRepeatedPeerWait : kPeerWait;
  slow_buffer_ = (*oldest)->pending.ready_within(limit) ? nullptr : oldest->get();
  if (slow_buffer_ != nullptr)
    return grow(chunk, stats);
  (*oldest)->pending.wait(device_);
  (*oldest)->own_send_buffers.clear();
  if ((*oldest)->capacity < chunk) {
    // The wait above put the old memory's last use in the caller's past, so replacing it is in order.
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
        buffer->pending.wait(device_);  // it may still be reading gradients that are borrowed
      } catch (const std::exception&) {
        // The device is lost, and nothing reads any more.
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

}  // namespace lightning_zero
