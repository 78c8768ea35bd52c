// Memory for buckets on their way.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/pending.h"

namespace lightning_zero {

// Send and receive memory of one bucket in flight.
struct BucketBuffer {
  int64_t capacity = 0;                      // elements per rank
  at::Tensor send;                           // ranks * capacity; like recv, undefined until it is needed
  at::Tensor recv;                           // capacity
  at::Tensor host_sums;                      // likewise; only with several hosts
  std::vector<at::Tensor> own_send_buffers;  // what travels and is not in `send`, until `pending` is over
  Pending pending;
  bool filling = false;
};

struct PoolStats {
  int64_t grown = 0;      // a bucket larger than the capacity, or a third buffer
  int64_t allocated = 0;  // buffers allocated
};

// Buffers of one dtype: two by default, so that one fills while the other is reduced.
class BufferPool {
 public:
  BufferPool(at::ScalarType dtype, const c10::Device& device, int ranks, int64_t capacity, int depth);

  // Elements per rank that the buckets to come need, so that buffers are neither larger nor replaced.
  void expect(int64_t chunk) { expected_ = std::min(chunk, capacity_); }

  // A buffer for `chunk` elements per rank. Waits for the oldest reduce-scatter when all are in flight.
  // Grows beyond `depth` when all are still filling, or when the oldest is held up by a peer.
  BucketBuffer* acquire(int64_t chunk, PoolStats& stats);

  void drain();    // waits for everything in flight
  void release();  // drain, then give the memory back
  void discard();  // forget what is in flight: nobody wants the results
  int64_t bytes() const;

 private:
  BucketBuffer* grow(int64_t chunk, PoolStats& stats);

  at::ScalarType dtype_;
  c10::Device device_;
  int ranks_;
  int64_t capacity_;
  int64_t expected_ = 0;
  size_t depth_;
  const BucketBuffer* slow_buffer_ = nullptr;                 // which was not ready when it was wanted
  std::deque<std::unique_ptr<BucketBuffer>> buffers_;  // oldest use first
};

// The pools of all dtypes.
class BufferPools {
 public:
  using Make = std::function<std::unique_ptr<BufferPool>(at::ScalarType)>;
  explicit BufferPools(Make make) : make_(std::move(make)) {}

  BufferPool& for_dtype(at::ScalarType dtype);
  void drain();
  void release();
  void discard();
  // Forgets pools, with what is on its way: their memory and fences belong to somebody who goes.
  void clear() { pools_.clear(); }
  // The same, but whoever asks keeps them, and may bring them back.
  using Pools = std::unordered_map<int, std::unique_ptr<BufferPool>>;
  Pools exchange(Pools others) { return std::exchange(pools_, std::move(others)); }
  int64_t bytes() const;

 private:
  Make make_;
  Pools pools_;
};

}  // namespace lightning_zero
