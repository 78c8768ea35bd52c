// The interfaces of transports, which gather weights and reduce gradients, and the selection of transports.
//
// To add a transport, write a class in its own file and add it to transport.cpp, the only place that creates
// and selects transports. Transports do not know each other. A GatherTransport is added to the list of
// Transports' constructor; gathers use the first one that can_gather(). A ReduceTransport replaces the
// previous one. If it needs memory of every rank, Python provides that (sharding/symm_mem/) by a method of
// Transports, bound in bindings/. A transport queues work through a Communicator, which has one stream for
// weights and one for gradients and reports waits to the watchdog. Ranks gather the same weights only if
// `grouped` is true. Otherwise, a collective gather must not depend on state that differs between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "sync/epoch_lock.h"
#include "transport/communicator.h"
#include "transport/pending.h"
#include "transport/row_means.h"
#include "weights/param_registry.h"

namespace lightning_zero {

class ReduceBucket;

// The memory of weights on this rank and its peers, as transports see it. Implemented by ShardAccess.
class WeightMemory {
 public:
  virtual ~WeightMemory() = default;
  // Return true if every rank's copies may be read, until the next point of change.
  virtual bool is_published() const = 0;
  // Return true if an epoch lock separates writes of shards from reads.
  virtual bool uses_epoch_lock() const = 0;
  // Let work that is queued from now on read the shards, after it has waited for writers.
  virtual void begin_reading() = 0;
  // Return this rank's shard in `dtype`; undefined if a cast is needed.
  virtual at::Tensor local_source(ParamRecord& record, at::ScalarType dtype) = 0;
  // Let work that is queued on the stream of weights read the copy in `dtype` of this rank, or of all ranks
  // of its host with `from_peers`. For compiled code, after is_published().
  virtual void wait_for_shard(ParamRecord& record, at::ScalarType dtype, bool from_peers) = 0;
};

class GatherTransport {
 public:
  virtual ~GatherTransport() = default;

  // Return true if the transport can gather these weights into `outputs` (1-D, padded, one per weight, in the
  // requested dtypes). `grouped`: for compiled code, after a point that all ranks have passed, and with the
  // same weights on all ranks. Otherwise one weight, at any point of the program.
  virtual bool can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>& outputs,
                          bool grouped) const = 0;

  // Start a gather. `sources` must live until it has completed.
  virtual Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                         std::vector<at::Tensor>& sources, bool grouped) = 0;

  // Return true if the weights exist in `dtype` and this rank alone can gather them, so that it may prefetch
  // them.
  virtual bool is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const {
    return false;
  }

  // Return true if this rank may gather weights that its peers do not, at any time.
  virtual bool gathers_alone() const { return false; }
};

class ReduceTransport {
 public:
  virtual ~ReduceTransport() = default;

  // Send a sealed bucket and add the mean over ranks to the gradient shards. bucket.buffer()->pending
  // completes it.
  virtual void reduce(ReduceBucket& bucket) = 0;

  // Return the factor for gradients that are copied into a bucket of this dtype.
  virtual double scale(at::ScalarType dtype) const = 0;
  // Return true if the transport averages over ranks instead of summing.
  virtual bool averages(at::ScalarType dtype) const = 0;
  // Return true if each gradient is sent from separate memory, so that zero-copy is possible.
  virtual bool uses_own_send_buffers() const = 0;
  // Return the number of buckets per dtype that may be in flight before the caller's stream waits for the
  // first.
  virtual int buckets_in_flight() const = 0;
  // Return true if a bucket may be launched before the consensus that all ranks have it.
  virtual bool launches_early() const { return true; }

  // ---- barriers without names
  //
  // Ranks that passed them at different times would silently add up stale memory. So the consensus compares
  // the number of barriers before this backward.
  virtual void begin_backward() {}
  // Later launches may be a replay on one rank and a run on another, so they must not depend on earlier ones.
  virtual void begin_segment() {}
  virtual int64_t barriers_before() const { return 0; }
  virtual void forget_barriers() {}

  // ---- captures, see [Note: CUDA graphs] in cuda/graph_recorder.h
  //
  // The barriers and rounds of a recorded backward.
  struct Traffic {
    int64_t rounds = 0, barriers = 0;
  };
  virtual void begin_recording(bool backward) {}
  virtual Traffic end_recording() { return {}; }
  virtual void abort_recording() {}
  virtual void after_replay(const Traffic& traffic) {}
};

// Creates and selects the transports. Python provides the memory that they need.
class Transports {
 public:
  Transports(Context& context, Communicators& communicators);

  // In order of preference; the last one can gather everything.
  std::vector<std::unique_ptr<GatherTransport>> make_gathers(WeightMemory& memory);
  ReduceTransport& reduce() { return *reduce_; }

  // Set memory of each rank that this rank can write, in two halves, a multiple of staging_unit() bytes. See
  // [Note: one-sided reduce-scatter]. `group_name`: the group of the symmetric memory, on an accelerator.
  void set_staging(std::vector<at::Tensor> staging, const std::string& group_name, int64_t timeout_ms);
  int64_t staging_unit() const;
  // Use our barrier kernel instead of torch's; see DeviceBarrier.
  void set_barrier(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words);
  // Debugging: emulate a bandwidth between hosts, see EmulatedLink; 0: no limit. `code`: the compiled
  // kernels.cu, on a device.
  void limit_cross_host_bandwidth(const std::optional<at::Tensor>& code, double bytes_per_s);
  // Use the kernels of RowMeans.
  void set_mean_kernels(const at::Tensor& code);
  // For tests of the kernels: write or add the mean over the rows of `from` to `to`. Return true if a kernel
  // did.
  bool mean_rows(const at::Tensor& to, const at::Tensor& from, bool add) const {
    return means_(to, from, add);
  }

  // `numbers`: each rank's counter. Device variant, after set_barrier(): `code`: the compiled
  // signal_kernels.cu; `pads`: each rank's signal pad.
  std::unique_ptr<EpochLock> make_epoch_lock(std::vector<at::Tensor> numbers);
  std::unique_ptr<EpochLock> make_device_epoch_lock(const at::Tensor& code, std::vector<at::Tensor> pads);

  // With several hosts: signal the arrival of exchanged parts to the ranks of this host, see RemoteSignals;
  // on a CPU by counters, on a device by kernels, after set_barrier() if that is used. Not during a capture.
  void set_remote_signals(std::vector<at::Tensor> numbers);
  void set_device_remote_signals(const at::Tensor& code, std::vector<at::Tensor> pads);

  // Begin a stage of training or evaluation on every rank, and agree on the number of steps: an exception may
  // have ended the previous stage at different steps.
  void begin_stage();
  // Return the number of the training step that begins on every rank.
  int64_t next_step() { return ++steps_; }
  // Ranks no longer wait for parts of an interrupted step.
  void begin_step(bool in_backward);
  // A backward was interrupted, at another point than on peers: release their devices from barriers.
  void release_barriers();
  void close();

 private:
  void use_collective_reduce();
  void set_reduce(std::unique_ptr<ReduceTransport> intra_host);  // and across hosts, with several hosts

  Context& context_;
  Communicators& communicators_;
  std::unique_ptr<ReduceTransport> reduce_;
  RowMeans means_;
  std::shared_ptr<DeviceBarrier> barrier_;
  int64_t steps_ = 0;         // number of training steps, for barriers and the epoch lock
  bool interrupted_ = false;  // devices were released from barriers
};

}  // namespace lightning_zero
