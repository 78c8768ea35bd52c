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
#pragma once

#include <functional>
#include <memory>

#include "context.h"
#include "runtime/turns.h"
#include "transport/communicator.h"
#include "transport/transport.h"
#include "weights/compute_copies.h"
#include "weights/host_shards.h"

namespace lightning_zero {

class Access : public WeightMemory {
 public:
  // `comm`: of what reads peers' memory. `host_shards`: null where there is one host. `before_change`: what
  // has been fetched ahead is of values that go.
  Access(Context& context, Communicator& comm, ComputeCopies& copies, HostShards* host_shards,
         std::function<void()> before_change)
      : context_(context),
        comm_(comm),
        copies_(copies),
        host_shards_(host_shards),
        before_change_(std::move(before_change)) {}

  // Peers read compute copies.
  void share() { shared_ = true; }
  // What peers read is not what it was.
  void take_back() { published_ = false; }
  // Peers read shards, in turns.
  void take(std::unique_ptr<Turns> turns);
  // Whether peers read anything.
  bool is_shared() const { return shared_ || turns_ || (host_shards_ != nullptr && host_shards_->any()); }

  bool is_published() const override { return published_; }
  bool uses_epoch_lock() const override { return turns_ != nullptr; }
  at::Tensor source_in(ParamRecord& record, at::ScalarType dtype) override;
  void await_copy(ParamRecord& record, at::ScalarType dtype, bool of_peers) override;

  // -- where ranks take turns
  bool is_writing() const { return turns_->writing(); }
  void begin_turn_to_write();
  void end_writing();  // harmless where there are none
  void begin_reading() override;
  void begin_step(int64_t step);
  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);

  // Shards may have changed. Where ranks take turns nothing changes without begin_turn_to_write().
  void expire();
  // Likewise, without a word. Hosts would exchange all weights anew before each batch of an evaluation, and
  // do so only where begin_writing() has told them.
  void expire_unless_told();

  // Weights may be read here as they are now; on every rank. `everything`: all copies are written, and not
  // only stale ones. `wait`: by the current stream, too, and not only by what this executor launches.
  void let_read(bool everything, bool wait = false);
  // A graph is about to be captured, and then replayed: what let_read() does before the replay is done now,
  // since what is captured depends on it. Nothing is left to do then that other ranks, which may run the
  // same, did not.
  void let_read_ahead();
  // What is queued on the current stream next may read the host shard that is the resident weight.
  void await_resident(ParamRecord& record, bool compiled);
  void close();

 private:
  void publish(bool everything, bool wait);
  void publish_host_shards(bool wait);

  Context& context_;
  Communicator& comm_;
  ComputeCopies& copies_;
  HostShards* host_shards_;
  std::function<void()> before_change_;
  std::unique_ptr<Turns> turns_;
  bool shared_ = false;       // some compute copy is read by peers
  bool published_ = false;    // every rank's copies may be read, until the next point where they change
  bool asked_ahead_ = false;  // with several hosts: whether ranks have agreed for the next replay
};

}  // namespace lightning_zero
