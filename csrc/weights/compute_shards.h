// Copies of this rank's shards: in the dtype that is computed in (a parameter's compute copy), or in the
// shard's own where peers may not read shards themselves (its full-precision copy).
//
// [Note: shards on the host] A shard in the host's memory is read over a link that is slower than the
// device's memory by two orders of magnitude, so its copy is written where the shard is on the device anyway:
// by the optimizer's step. It is not written again before a training step, as others are, in case somebody
// has changed the shard without a word: whoever is no optimizer must tell, as where ranks take turns.
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

  // Copies that are neighbours in memory, of shards that are likewise: written in one kernel.
  void add_memory(at::Tensor copies, at::Tensor shards);
  bool has_memory() const;

  // Whether some are gradients that nobody wants: no step has come, and where ranks take turns nobody writes.
  bool any_unclaimed_gradient() const;
  // Not where it is a gradient that somebody wants.
  bool is_stale(const ParamRecord& record) const;
  // Parameters whose copies are stale; or all that have one.
  std::vector<ParamRecord*> stale(bool all) const;
  // The compute copy of one parameter; those of all, in few kernels; and full-precision copies.
  void write(ParamRecord& record);
  void write_all();  // of shards on the host only stale ones
  void write_full_precision(const std::vector<ParamRecord*>& records);

  // -- of shards on the host
  // Indices of those whose copies are as they should be.
  std::vector<int64_t> written() const;
  // An optimizer is about to write these copies, and has.
  void mark_compute_shards_written(std::vector<int64_t> indices, bool written);
  // Changes when somebody who is no optimizer says that shards change.
  int64_t user_write_count() const {
    Lock lock(context_.mutex);
    return context_.user_write_count;
  }

  void close() { memory_.clear(); }

  // While a graph is recorded nothing may be written: a replay would do it each time.
  bool recording = false;

 private:
  Stamp now(const ParamRecord& record) const;
  void is_written(ParamRecord& record);

  Context& context_;
  std::vector<std::pair<at::Tensor, at::Tensor>> memory_;
};

// When shards and their copies may be written, and when they may be read.
//
// [Note: copies from peers] Where all ranks can read each other's compute copies, compiled graphs fetch
// weights by plain copies: a copy engine does them, no multiprocessor, and no rank waits for another. What
// makes it safe is that a compute copy changes only at points which every rank passes: before the forward of
// a training step (Weights::refresh_compute_shards) and where a compiled graph begins (Weights::check_plan).
// There, all ranks have read what they wanted (first barrier), stale copies are written, and all ranks have
// written theirs (second barrier). Eager code, which may find a stale copy anywhere, casts the shard instead
// and gathers through the process group.
//
// [Note: turns] Where all ranks can read the shards themselves, everybody reads what it
// wants when it wants, out of compute copies and shards, and ranks need not read the same: what changes
// shards says so before (begin_writing), and ranks take turns. See runtime/turns.h. There are no barriers
// where graphs begin, and eager code copies, too. Whether eager code has edited a weight that it was given
// must be told alike on every rank, and without a look at values on a device: its memory is marked as
// copy-on-write, with nobody to share it, so that whoever may write to it takes the mark away. Only then
// values are compared.
//
// With several hosts there are no turns: what ranks of a host read from each other are host shards. At the
// same points, once all have read, it begins that they are brought up to date with other hosts, and who reads
// one waits until that is over for it; see [Note: the exchange] in weights/exchange.h. Whether that is needed
// ranks agree on: of all that is stale anywhere, no rank may leave out anything.

class ShardAccess : public WeightMemory {
 public:
  // `comm`: of what reads peers' memory. `host_shards`: null where there is one host. `before_change`: what
  // has been fetched ahead is of values that go.
  ShardAccess(Context& context, Communicator& comm, ComputeShards& copies, HostShards* host_shards,
              std::function<void()> on_change)
      : context_(context),
        comm_(comm),
        compute_shards_(copies),
        host_shards_(host_shards),
        on_change_(std::move(on_change)) {}

  // Peers read compute copies.
  void set_shared() { shared_ = true; }
  // What peers read is not what it was.
  void invalidate() { published_ = false; }
  // Peers read shards, in turns.
  void set_epoch_lock(std::unique_ptr<EpochLock> epoch_lock);
  // Whether peers read anything.
  bool is_shared() const {
    return shared_ || epoch_lock_ || (host_shards_ != nullptr && host_shards_->any());
  }

  bool is_published() const override { return published_; }
  bool uses_epoch_lock() const override { return epoch_lock_ != nullptr; }
  at::Tensor local_source(ParamRecord& record, at::ScalarType dtype) override;
  void wait_for_shard(ParamRecord& record, at::ScalarType dtype, bool from_peers) override;

  // -- where ranks take turns
  bool is_writing() const { return epoch_lock_->is_writing(); }
  void begin_write_epoch();
  void end_writing();  // harmless where there are none
  void begin_reading() override;
  void begin_step(int64_t step);
  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);

  // Shards may have changed. Where ranks take turns nothing changes without begin_turn_to_write().
  void expire();
  // Likewise, without a word. Hosts would exchange all weights anew before each batch of an evaluation, and
  // do so only where begin_writing() has told them.
  void expire_on_single_host();

  // Weights may be read here as they are now; on every rank. `everything`: all copies are written, and not
  // only stale ones. `wait`: by the current stream, too, and not only by what this executor launches.
  void publish(bool all, bool wait = false);
  // A graph is about to be captured, and then replayed: what let_read() does before the replay is done now,
  // since what is captured depends on it. Nothing is left to do then that other ranks, which may run the
  // same, did not.
  void publish_before_capture();
  // What is queued on the current stream next may read the host shard that is the resident weight.
  void wait_for_resident(ParamRecord& record, bool compiled);
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
  bool shared_ = false;     // some compute copy is read by peers
  bool published_ = false;  // every rank's copies may be read, until the next point where they change
  bool published_before_capture_ =
      false;  // with several hosts: whether ranks have agreed for the next replay
};

}  // namespace lightning_zero
