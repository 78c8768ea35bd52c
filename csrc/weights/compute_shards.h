// Owns the copies of this rank's shards (ComputeShards), and defines when shards and copies may be written
// and read (ShardAccess).
//
// A compute shard has the compute dtype. A full-precision shard has the shard's own dtype and exists where
// peers may not read the shards themselves.
//
// [Note: copies written by a step] A captured optimizer step has the weights in registers, and writes their
// compute shards, if no peer can read these meanwhile: there are none, or an epoch lock keeps them out. Such
// a copy is not rewritten before a training step to catch unannounced changes, as other compute shards are:
// everything except the optimizer must announce changes, as with an epoch lock. The tensors that users see do
// so in Python, see sharding/shard_rules.py. A gradient may use the copy's memory until the step has read it.
//
// [Note: shards on the host] A shard in host memory is read over a link that is two orders of magnitude
// slower than device memory. Every optimizer step has the shard on the device anyway, and writes the copy.
//
// [Note: fp8 shards] A weight whose products are all in fp8 is gathered in fp8: each rank divides its shard
// by a factor that is the same on all ranks, since it is the largest absolute value in any of their shards,
// over the largest fp8 number. Python computes factors and writes all fp8 shards, see sharding/fp8_shards.py
// for the times. In between, a stale fp8 shard is written before it is read, or with an epoch lock when a
// write epoch ends. It gets the present factor, because a new one would need all ranks. An fp8 shard is a
// cache: without one, a gather casts.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "context.h"
#include "sync/epoch_lock.h"
#include "transport/communicator.h"
#include "transport/transport.h"
#include "weights/host_exchange.h"

namespace lightning_zero {

class ComputeShards {
 public:
  explicit ComputeShards(Context& context) : context_(context) {}

  // Add compute shards that are contiguous in memory, like their shards, to be written by one kernel.
  void add_memory(at::Tensor copies, at::Tensor shards);
  bool has_memory() const;

  // Return true if some hold gradients that are no longer attached. No optimizer step has come, so with an
  // epoch lock none has been rewritten.
  bool any_unclaimed_gradient() const;
  // Return false for memory that holds an attached gradient.
  bool is_stale(const ParamRecord& record) const;
  // Return the parameters with stale compute shards, or all with one.
  std::vector<ParamRecord*> stale(bool all) const;
  // Write one compute shard, all compute shards in few kernels, or full-precision shards.
  void write(ParamRecord& record);
  void write_all();  // those that steps write only if they are stale
  void write_full_precision(const std::vector<ParamRecord*>& records);

  // ---- fp8 shards
  //
  // Return this rank's shard in fp8; undefined if there is no memory for it.
  at::Tensor fp8_source(ParamRecord& record);
  void write_stale_fp8();
  // Python has written all fp8 shards.
  void mark_fp8_shards_written();

  // ---- copies written by a step
  //
  // Return the indices of parameters whose compute shard a step has written and that is valid.
  std::vector<int64_t> valid_indices() const;
  // Called before (false) and after (true) an optimizer writes these compute shards.
  void mark_compute_shards_written(std::vector<int64_t> indices, bool written);
  // Increases when something other than an optimizer announces a shard change.
  int64_t user_write_count() const {
    Lock lock(context_.mutex);
    return context_.user_write_count;
  }

  void close() { memory_.clear(); }

  // Compute shards must not be written during a capture, or every replay would write them.
  bool recording = false;

 private:
  Stamp now(const ParamRecord& record) const;
  bool is_left_alone(const ParamRecord& record) const;  // by write_all()
  void is_written(ParamRecord& record);

  Context& context_;
  std::vector<std::pair<at::Tensor, at::Tensor>> memory_;
};

// [Note: copies from peers] If all ranks can read each other's compute shards, compiled graphs gather weights
// by plain copies. Copy engines execute them, so they occupy no SM, and no rank waits for another. This is
// safe because compute shards change only where all ranks pass: before the forward of a training step
// (Weights::refresh_compute_shards) and at the beginning of a compiled graph (Weights::check_plan). At these
// points a first barrier waits until all ranks have read, stale copies are written, and a second barrier
// waits until all ranks have written. Eager code may find a stale copy at any point, so it casts the shard
// and gathers through the process group.
//
// [Note: epoch lock] If all ranks can read the shards themselves, each rank reads compute shards and shards
// whenever it wants, and ranks need not read the same weights. Code that changes shards announces it
// (begin_writing), and an epoch lock separates reads from writes, see sync/epoch_lock.h. Graphs then begin
// without barriers, and eager code copies too. All ranks must decide alike whether eager code has written to
// a weight, without reading device memory. So its storage is marked as copy-on-write, and any code that may
// write removes the mark. Only then are values compared.
//
// With several hosts there is no epoch lock, and ranks of a host read each other's host shards. At the same
// points, after all ranks have read, the exchange with other hosts begins. A reader waits until its host
// shard has arrived, see [Note: host exchange] in weights/host_exchange.h. All ranks agree on whether an
// exchange is needed, because no rank may skip a stale shard.
class ShardAccess : public WeightMemory {
 public:
  // `comm`: orders reads of peers' memory. `host_shards`: null with one host. `on_change`: drops prefetched
  // weights.
  ShardAccess(Context& context, Communicator& comm, ComputeShards& copies, HostShards* host_shards,
              std::function<void()> on_change)
      : context_(context),
        comm_(comm),
        compute_shards_(copies),
        host_shards_(host_shards),
        on_change_(std::move(on_change)) {}

  // Peers read compute shards.
  void set_shared() { shared_ = true; }
  // The memory that peers read has changed.
  void invalidate() { published_ = false; }
  // Peers read shards, guarded by an epoch lock.
  void set_epoch_lock(std::unique_ptr<EpochLock> epoch_lock);
  // Return true if peers read any memory of this rank.
  bool is_shared() const {
    return shared_ || epoch_lock_ || (host_shards_ != nullptr && host_shards_->any());
  }

  bool is_published() const override { return published_; }
  bool uses_epoch_lock() const override { return epoch_lock_ != nullptr; }
  at::Tensor local_source(ParamRecord& record, at::ScalarType dtype) override;
  void wait_for_shard(ParamRecord& record, at::ScalarType dtype, bool from_peers) override;

  // ---- with an epoch lock
  bool is_writing() const { return epoch_lock_->is_writing(); }
  void begin_write_epoch();
  void end_writing();  // no effect without an epoch lock
  void begin_reading() override;
  void begin_step(int64_t step);
  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);

  // Shards may have changed. With an epoch lock this requires begin_write_epoch().
  void expire();
  // Shards may have changed without an announcement. With several hosts only begin_writing() counts, or hosts
  // would exchange all weights before each evaluation batch.
  void expire_on_single_host();

  // Make weights readable as they are now, on every rank. `all`: write all compute shards, not only stale
  // ones. `wait`: the current stream waits too.
  void publish(bool all, bool wait = false);
  // Do before a capture the work that publish() does before a replay, because the captured graph depends on
  // it. The replay then needs no work that other ranks, which may run the same graph eagerly, did not do.
  void publish_before_capture();
  // Work queued on the current stream may then read the host shard that is the cached weight.
  void wait_for_cached(ParamRecord& record, bool compiled);
  void close();

 private:
  void publish_compute_shards(bool all, bool wait);
  void publish_host_shards(bool wait);

  Context& context_;
  Communicator& comm_;
  ComputeShards& compute_shards_;
  HostShards* host_shards_;
  std::function<void()> on_change_;
  std::unique_ptr<EpochLock> epoch_lock_;
  bool shared_ = false;                    // peers read some compute shards
  bool published_ = false;                 // every rank's copies may be read, until the next point of change
  bool published_before_capture_ = false;  // with several hosts: ranks have agreed for the next replay
};

}  // namespace lightning_zero
