// What ranks have sent, on its way into gradient shards: added up in float32, or added up already.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "context.h"
#include "transport/pending.h"
#include "transport/row_means.h"
#include "weights/param_registry.h"

namespace lightning_zero {

// Writes to `to`, or adds, what comes of the elements from `begin` on.
using ApplySum = std::function<void(const at::Tensor& to, int64_t begin, bool add)>;

// The mean over rows, one for each rank, taken in float32, of elements from `begin` on. While `mean` lives.
ApplySum make_row_mean(at::Tensor rows, int64_t begin, const RowMeans& mean);
// Of all elements, times `factor`: a reduce-scatter has added them up.
ApplySum make_product(at::Tensor sums, double factor);

// Memory for buckets on their way.

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
  const BucketBuffer* slow_buffer_ = nullptr;          // which was not ready when it was wanted
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

// A ReduceBucket collects the gradients of a fixed list of parameters of one dtype and hands them to one
// reduce-scatter.
//
// States, once per backward: EMPTY -> FILLING -> LAUNCHED -> EMPTY.
// The list is fixed, and the executor launches buckets in one fixed order, so that every rank issues the
// same collectives whatever gradients arrived on it; a gradient that is missing travels as zeros.
// The memory is borrowed from a BufferPool while FILLING and LAUNCHED. Nothing here launches work.
//
// A gradient that its owner leaves alone until further notice is borrowed instead of copied: what travels is
// read from where it lies.
//
// Memory of a bucket: one run of `ranks` host shards for each parameter, so that a gradient is copied in by
// one contiguous copy and its padding is the end of its run. The reduce-scatters of all parameters in a
// bucket are one launch. `ranks` are those of a host; with several hosts what comes of them goes on, see
// [Note: hosts].

class ReduceBucket {
 public:
  enum class State { EMPTY, FILLING, LAUNCHED };

  struct Slot {
    ParamRecord* record;
    int64_t offset;         // of the host shard within recv(); its run in send() begins at ranks * offset
    int arrivals = 0;       // this backward
    int expected = 1;       // arrivals after which it need not be waited for
    bool add = false;       // the gradient shard already holds a value that counts
    bool repeated = false;  // an earlier bucket of the same backward has a slot for the parameter, too
    // Whether it takes along what waits whole on this rank.
    bool takes_deferred() const { return !repeated && record->deferred.whole && record->deferred.filled; }
  };

  ReduceBucket(at::ScalarType dtype, const Ranks& intra_host, const Ranks& inter_host, int64_t segment)
      : dtype_(dtype), ranks_(intra_host.size), hosts_(inter_host.size), segment_(segment) {}

  void append(ParamRecord* record, int expected, bool repeated);

  // FILLING from EMPTY. Decides, per parameter, whether to overwrite or to add to its gradient shard:
  // must come before autograd can touch param.grad in this backward. `adding`: to all of them, since they
  // hold what the same gradients' first bucket brought. `decided`: whoever replays this will see to it. What
  // an earlier bucket brings by the time that this one leaves, seal() is told.
  void open(BucketBuffer* buffer, bool adding, std::optional<bool> decided);
  // LAUNCHED from EMPTY: a graph that was replayed has sent everything.
  void mark_launched();

  // Copies `grad` (any layout and dtype, the whole parameter's elements) times scale into its slot, cast in
  // the same kernel; adds when the slot was filled before. Legal only while FILLING.
  // `borrow`: leave it where it is, if what travels are its very bytes.
  void add(size_t slot, const at::Tensor& grad, bool zero_copy = false);

  // The owner wants a borrowed gradient's memory back. Copies it when it has not been read yet.
  void release(size_t slot, const c10::Stream& stream);
  // What travels has been read by what `stream` has been given so far.
  void record_read(const c10::Stream& stream);

  bool is_complete() const;  // every slot has what it expects, and at least one gradient is there

  // FILLING -> LAUNCHED. Zeroes the slots nothing arrived for, and takes along what earlier backwards have
  // left whole on this rank; the caller launches send() -> recv(). `has_more`: whether an earlier bucket has
  // brought something of a slot that is there `again`.
  void seal(const std::function<bool(const Slot&)>& has_more);

  // Moves elements `begin` to `begin + width` of what ranks have sent into the gradient shards; with several
  // hosts, into host_sums(). `across`: it is what all hosts have made of their host_sums(), and comes into
  // the gradient shards.
  void accumulate(int64_t begin, int64_t width, const ApplySum& sums, bool inter_host = false);

  void reset();  // any -> EMPTY; forgets the buffer

  State state() const { return state_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t chunk() const { return chunk_; }      // elements of the host shards
  int64_t segment() const { return segment_; }  // see [Note: segments of a backward]
  std::vector<Slot>& slots() { return slots_; }
  BucketBuffer* buffer() { return buffer_; }
  at::Tensor send() { return piece(memory(buffer_->send, ranks_ * buffer_->capacity), 0, ranks_ * chunk_); }
  at::Tensor recv() { return piece(memory(buffer_->recv, buffer_->capacity), 0, chunk_); }
  // The part of send() that belongs to one parameter: what travels for it; with `own_send_buffers`, a tensor
  // of its own, or the gradient that is borrowed.
  at::Tensor send_slice(size_t slot);
  // With several hosts: chunk() elements, in float32 or what is wider. What earlier backwards have left on
  // this host is added to it, and counts as taken along.
  at::Tensor sum_on_host();
  // As open() finds them: how the transport wants gradients.
  bool own_send_buffers = false;
  bool deferred = false;  // nothing crosses hosts, see [Note: deferred gradients]
  double scale = 1.0;
  bool nan_fill = false;

 private:
  // `tensor`, made at its first use.
  at::Tensor& memory(at::Tensor& tensor, int64_t numel) { return memory(tensor, numel, dtype_); }
  at::Tensor& memory(at::Tensor& tensor, int64_t numel, at::ScalarType dtype);
  void copy_borrowed(size_t slot);  // copies a gradient that is borrowed
  void copy_in(size_t slot, const at::Tensor& grad);
  at::Tensor fp32_memory();
  // Where a slot's values go, and whether they are added.
  struct Target {
    at::Tensor memory;
    bool* add;
  };
  template <class Find>
  void apply_to_runs(int64_t begin, int64_t width, const ApplySum& sums, int64_t parts, Find&& target);

  at::ScalarType dtype_;
  int64_t ranks_, hosts_;
  int64_t segment_;
  int64_t chunk_ = 0;
  // By slot: what travels, with `own_send_buffers`. `borrowed`: the gradient itself. Not the buffer's, which
  // serves another bucket before the last of these is released. `waits`: the gradient was added to what
  // earlier backwards have left whole on this rank, and travels with that.
  struct Sent {
    at::Tensor flat;
    bool zero_copy = false;
    bool in_deferred = false;
  };
  std::vector<Sent> sent_;
  Fence read_;
  at::Tensor scale_;  // of put(), the same each time
  std::vector<Slot> slots_;
  State state_ = State::EMPTY;
  BucketBuffer* buffer_ = nullptr;
};

}  // namespace lightning_zero
