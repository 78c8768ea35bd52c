// A ReduceBucket collects the gradients of a fixed list of parameters of one dtype and hands them to one
// reduce-scatter.
//
// States, once per backward: EMPTY -> FILLING -> LAUNCHED -> EMPTY.
// The list is fixed, and the executor launches buckets in one fixed order, so that every rank issues the
// same collectives whatever gradients arrived on it; a gradient that is missing travels as zeros.
// The memory is borrowed from a BufferPool while FILLING and LAUNCHED. Nothing here launches work.
//
// Memory of a bucket: one run of `ranks` shards for each parameter, so that a gradient is copied in by one
// contiguous copy and its padding is the end of its run. The reduce-scatters of all parameters in a bucket
// are one launch.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "comm.h"
#include "param_registry.h"

namespace lightning_zero {

// Send and receive memory of one bucket in flight.
struct BucketBuffer {
  at::Tensor send;  // ranks * capacity
  at::Tensor recv;  // capacity
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
  std::deque<std::unique_ptr<BucketBuffer>> buffers_;  // oldest use first
};

class ReduceBucket {
 public:
  enum class State { EMPTY, FILLING, LAUNCHED };

  struct Slot {
    ParamRecord* record;
    int64_t offset;    // of the shard within recv(); its run in send() begins at ranks * offset
    int arrivals = 0;  // this backward
    int expected = 1;  // arrivals after which it need not be waited for
    bool add = false;  // the gradient shard already holds a value that counts
  };

  ReduceBucket(at::ScalarType dtype, int ranks) : dtype_(dtype), ranks_(ranks) {}

  void append(ParamRecord* record, int expected);

  // FILLING from EMPTY. Decides, per parameter, whether to overwrite or to add to its gradient shard:
  // must come before autograd can touch param.grad in this backward. `adding`: to all of them, since they
  // hold what the same gradients' first bucket brought.
  void open(BucketBuffer* buffer, bool adding);

  // Copies `grad` (any layout and dtype, the whole parameter's elements) times `scale` into its slot, cast in
  // the same kernel; adds when the slot was filled before. Legal only while FILLING.
  void put(size_t slot, const at::Tensor& grad, double scale);

  bool complete() const;  // every slot has what it expects, and at least one gradient is there

  // FILLING -> LAUNCHED. Zeroes the slots nothing arrived for; the caller launches send() -> recv().
  void seal();

  // Moves recv() into the gradient shards. Runs behind the reduce-scatter.
  void accumulate();

  void reset();  // any -> EMPTY; forgets the buffer

  State state() const { return state_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t chunk() const { return chunk_; }
  std::vector<Slot>& slots() { return slots_; }
  BucketBuffer* buffer() { return buffer_; }
  at::Tensor send() const { return piece(buffer_->send, 0, ranks_ * chunk_); }
  at::Tensor recv() const { return piece(buffer_->recv, 0, chunk_); }
  // The parts of send() and recv() that belong to one parameter.
  at::Tensor run(const Slot& slot) const;
  at::Tensor part(const Slot& slot) const {
    return piece(buffer_->recv, slot.offset, slot.record->shard_numel());
  }

 private:
  at::ScalarType dtype_;
  int ranks_;
  int64_t chunk_ = 0;
  at::Tensor scale_;  // of put(), the same each time
  std::vector<Slot> slots_;
  State state_ = State::EMPTY;
  BucketBuffer* buffer_ = nullptr;
};

}  // namespace lightning_zero
