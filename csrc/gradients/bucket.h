// Reduce buckets, the memory of buckets in flight, and the sums that go into gradient shards.
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

// Writes the reduced elements from `begin` on to `to`, or adds them.
using ApplySum = std::function<void(const at::Tensor& to, int64_t begin, bool add)>;

// Return a mean over rows, one per rank, in float32, of elements from `begin` on. `mean` must outlive the
// result.
ApplySum make_row_mean(at::Tensor rows, int64_t begin, const RowMeans& mean);
// Return `sums` times `factor`, for elements that a reduce-scatter has summed.
ApplySum make_product(at::Tensor sums, double factor);

// Send and receive memory of one bucket in flight.
struct BucketBuffer {
  int64_t capacity = 0;  // elements per rank
  at::Tensor send;       // ranks * capacity elements; undefined until first use, as are recv and host_sums
  at::Tensor recv;       // capacity elements
  at::Tensor host_sums;  // only with several hosts
  // memory sent from outside of `send`, until `pending` has completed
  std::vector<at::Tensor> own_send_buffers;
  Pending pending;
  bool filling = false;
};

struct PoolStats {
  int64_t grown = 0;      // buckets larger than the capacity, or buffers beyond `depth`
  int64_t allocated = 0;  // buffers allocated
};

// Buffers of one dtype. By default two, so that one fills while the other is reduced.
class BufferPool {
 public:
  BufferPool(at::ScalarType dtype, const c10::Device& device, int ranks, int64_t capacity, int depth);

  // Set the elements per rank that the next buckets need, so that buffers are allocated once with the right
  // size.
  void expect(int64_t chunk) { expected_ = std::min(chunk, capacity_); }

  // Return a buffer for `chunk` elements per rank. If all buffers are in flight, wait for the oldest
  // reduce-scatter. Allocate beyond `depth` if all buffers are filling or a peer delays the oldest.
  BucketBuffer* acquire(int64_t chunk, PoolStats& stats);

  void drain();    // wait for all buffers in flight
  void release();  // drain and free the memory
  void discard();  // forget buffers in flight, whose results are not needed
  int64_t bytes() const;

 private:
  BucketBuffer* grow(int64_t chunk, PoolStats& stats);

  at::ScalarType dtype_;
  c10::Device device_;
  int ranks_;
  int64_t capacity_;
  int64_t expected_ = 0;
  size_t depth_;
  const BucketBuffer* slow_buffer_ = nullptr;          // the buffer that exceeded the wait
  std::deque<std::unique_ptr<BucketBuffer>> buffers_;  // in order of last use
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
  // Forget all pools, including buffers in flight, because the owner of their memory goes away.
  void clear() { pools_.clear(); }
  // Replace the pools and return the previous ones, which the caller may restore.
  using Pools = std::unordered_map<int, std::unique_ptr<BufferPool>>;
  Pools exchange(Pools others) { return std::exchange(pools_, std::move(others)); }
  int64_t bytes() const;

 private:
  Make make_;
  Pools pools_;
};

// Collects the gradients of a fixed list of parameters of one dtype for one reduce-scatter.
//
// States, once per backward: EMPTY -> FILLING -> LAUNCHED -> EMPTY. The list is fixed, and the reducer
// launches buckets in a fixed order, so that every rank issues the same collectives for any set of gradients.
// Missing gradients are sent as zeros. Buffers are taken from a BufferPool while FILLING and LAUNCHED. A
// bucket launches nothing itself.
//
// A zero-copy gradient, whose owner does not modify it for now, is sent from its own memory.
//
// Memory: for each parameter, `ranks` consecutive host shards. A gradient is written by one contiguous copy,
// followed by its padding. All reduce-scatters of a bucket are one launch. `ranks` are those of one host; for
// several hosts see [Note: hosts].
class ReduceBucket {
 public:
  enum class State { EMPTY, FILLING, LAUNCHED };

  struct Slot {
    ParamRecord* record;
    int64_t offset;         // of the host shard in recv(); its slice in send() begins at ranks * offset
    int arrivals = 0;       // in this backward
    int expected = 1;       // arrivals after which the bucket does not wait for it
    bool add = false;       // add to the gradient shard instead of overwriting it
    bool repeated = false;  // an earlier bucket of this backward also has a slot for the parameter
    // Return true if the slot sends the full deferred gradient of this rank.
    bool takes_deferred() const { return !repeated && record->deferred.full && record->deferred.filled; }
  };

  ReduceBucket(at::ScalarType dtype, const Ranks& intra_host, const Ranks& inter_host, int64_t segment)
      : dtype_(dtype), ranks_(intra_host.size), hosts_(inter_host.size), segment_(segment) {}

  void append(ParamRecord* record, int expected, bool repeated);

  // EMPTY -> FILLING. Decide per parameter whether its gradient shard is overwritten or added to, before
  // autograd can change param.grad. `adding`: add to all, which hold the sums of their first bucket.
  // `decided`: the decision of a captured graph. Contributions of earlier buckets are passed to seal().
  void open(BucketBuffer* buffer, bool adding, std::optional<bool> decided);
  // EMPTY -> LAUNCHED, after a replayed graph has sent everything.
  void mark_launched();

  // Copy `grad` (any layout and dtype, all elements of the parameter) times `scale` into its slot, cast in
  // the same kernel. Add if the slot is already filled. Legal while FILLING. `zero_copy`: send the gradient
  // from its own memory, if its bytes are what is sent.
  void add(size_t slot, const at::Tensor& grad, bool zero_copy = false);

  // The owner needs a zero-copy gradient's memory again. Copy it unless it has been sent.
  void release(size_t slot, const c10::Stream& stream);
  // The sent memory has been read by the work queued on `stream` so far.
  void record_read(const c10::Stream& stream);

  bool is_complete() const;  // every slot has its expected arrivals, and at least one gradient arrived
  // A launch would fill memory with zeros that still holds a weight. A graph that is running may read it.
  bool clears_weights() const;

  // FILLING -> LAUNCHED. Zero the slots without arrivals and add full deferred gradients. The caller launches
  // send() -> recv(). `has_more`: returns true if an earlier bucket contributed to a repeated slot.
  void seal(const std::function<bool(const Slot&)>& has_more);

  // Apply elements `begin` to `begin + width` of the received sums to the gradient shards; with several
  // hosts, to host_sums. `inter_host`: the elements are sums over all hosts and go to the gradient shards.
  void accumulate(int64_t begin, int64_t width, const ApplySum& sums, bool inter_host = false);

  // Apply the gradients of a single rank from the memory that would be sent.
  void accumulate_sent();

  void reset();  // any -> EMPTY; releases the buffer

  State state() const { return state_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t chunk() const { return chunk_; }      // elements of all host shards
  int64_t segment() const { return segment_; }  // see [Note: segments of a backward]
  std::vector<Slot>& slots() { return slots_; }
  BucketBuffer* buffer() { return buffer_; }
  at::Tensor send() {
    return flat_range(memory(buffer_->send, ranks_ * buffer_->capacity), 0, ranks_ * chunk_);
  }
  at::Tensor recv() { return flat_range(memory(buffer_->recv, buffer_->capacity), 0, chunk_); }
  // Return the slice of send() of one parameter; with `own_send_buffers`, a separate tensor or the zero-copy
  // gradient.
  at::Tensor send_slice(size_t slot);
  // With several hosts: return chunk() elements in float32 or wider. Add the deferred gradients of this host,
  // which then count as sent.
  at::Tensor sum_on_host();
  // Set before open(): properties of the transport.
  bool own_send_buffers = false;
  bool deferred = false;  // nothing crosses hosts, see [Note: deferred gradients]
  double scale = 1.0;
  bool nan_fill = false;

 private:
  // Return `tensor`, allocated at its first use.
  at::Tensor& memory(at::Tensor& tensor, int64_t numel) { return memory(tensor, numel, dtype_); }
  at::Tensor& memory(at::Tensor& tensor, int64_t numel, at::ScalarType dtype);
  void materialize(size_t slot);  // copies a zero-copy gradient into the bucket
  void copy_in(size_t slot, const at::Tensor& grad);
  at::Tensor fp32_memory();
  // Memory for a slot's result, and whether to add to it.
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
  // By slot: the memory that is sent, with `own_send_buffers`. It is not part of the buffer, which serves
  // another bucket before the last gradient is released. `zero_copy`: it is the gradient itself.
  // `in_deferred`: the gradient was added to this rank's full deferred gradient and is sent with it.
  struct Sent {
    at::Tensor flat;
    bool zero_copy = false;
    bool in_deferred = false;
  };
  std::vector<Sent> sent_;
  Fence read_;
  at::Tensor scale_;  // `scale` as a tensor, for add()
  std::vector<Slot> slots_;
  State state_ = State::EMPTY;
  BucketBuffer* buffer_ = nullptr;
};

}  // namespace lightning_zero
