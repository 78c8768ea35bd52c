// How whole weights come to a rank, and how gradients leave it: the two interfaces behind which all
// transports lie.
//
// To add a transport, write a class in a file of its own beside this one, and name it in transports.cpp, the
// one place where transports are made and chosen; nothing else knows which there are, and they know nothing
// of each other. A GatherTransport joins the list that Transports' constructor makes: whoever gathers asks
// the first of it that can. A ReduceTransport takes the place of the one before. Memory that it needs of
// every rank comes from Python (sharding/symm_mem.py) by a method of Transports, bound in bindings/. What it
// queues goes through a Communicator, which keeps one stream for weights and one for gradients and tells the
// watchdog who waits for whom. Ranks gather alike only where `grouped` is true: what is to be done together
// elsewhere must not need anything that a rank may lack.
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

// What transports ask about the memory in which weights lie on this rank and its peers; see weights/access.h.
class WeightMemory {
 public:
  virtual ~WeightMemory() = default;
  // Whether every rank's copies may be read, until the next point where they change.
  virtual bool is_published() const = 0;
  // Whether ranks take turns to write shards and to read them.
  virtual bool uses_epoch_lock() const = 0;
  // What this queues from here on may read them; after it has waited for whoever writes.
  virtual void begin_reading() = 0;
  // This rank's shard in `dtype`; undefined when a cast is needed.
  virtual at::Tensor local_source(ParamRecord& record, at::ScalarType dtype) = 0;
  // What is queued on the stream of weights from here on may read the copy in `dtype` of this rank, or of all
  // of its host where `of_peers`: before compiled code does, and after is_published().
  virtual void wait_for_shard(ParamRecord& record, at::ScalarType dtype, bool from_peers) = 0;
};

class GatherTransport {
 public:
  virtual ~GatherTransport() = default;

  // Whether it can bring these weights into `outputs` (1-D, padded, one for each, of the dtypes that are
  // wanted). `grouped`: for compiled code, behind a point that all ranks have passed together, and all of
  // them want the same; otherwise one weight, wherever code happens to read it.
  virtual bool can_gather(const std::vector<ParamRecord*>& records, const std::vector<at::Tensor>& outputs,
                          bool grouped) const = 0;

  // Starts to. `sources` must live until they are there.
  virtual Pending gather(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                         std::vector<at::Tensor>& sources, bool grouped) = 0;

  // Whether these lie somewhere in `dtype`, and this rank alone can bring them here: then it may begin to
  // before they are asked for.
  virtual bool is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const {
    return false;
  }

  // Whether this rank may gather what its peers do not, at any time.
  virtual bool gathers_alone() const { return false; }
};

class ReduceTransport {
 public:
  virtual ~ReduceTransport() = default;

  // Sends what is in a sealed bucket, and adds the mean over ranks into gradient shards;
  // bucket.buffer()->pending tells when.
  virtual void reduce(ReduceBucket& bucket) = 0;

  // What gradients are multiplied with on their way into a bucket of that dtype.
  virtual double scale(at::ScalarType dtype) const = 0;
  // Whether it is a mean that it takes of what ranks have sent, and not a sum.
  virtual bool averages(at::ScalarType dtype) const = 0;
  // Whether each gradient travels from memory of its own, and may be left where its owner has it.
  virtual bool uses_own_send_buffers() const = 0;
  // How many buckets of a dtype may be on their way before the caller's stream waits for the first.
  virtual int buckets_in_flight() const = 0;
  // Whether a bucket may leave before ranks have agreed that all have it.
  virtual bool launches_early() const { return true; }

  // -- barriers that bear no name: had ranks come to them at different times, they would add up what
  // is not there yet, without a word. So they compare at their agreement how many there were before this
  // backward.
  virtual void begin_backward() {}
  // What is sent from here on may be a replay on one rank, and a run on another: nothing depends on what came
  // before.
  virtual void begin_segment() {}
  virtual int64_t barriers_before() const { return 0; }
  virtual void forget_barriers() {}

  // -- while a graph of the device is recorded, see [Note: captured graphs] in cuda_graph/recorder.h
  // What a recorded backward would have counted.
  struct Traffic {
    int64_t rounds = 0, barriers = 0;
  };
  virtual void begin_recording(bool backward) {}
  virtual Traffic end_recording() { return {}; }
  virtual void abort_recording() {}
  virtual void after_replay(const Traffic& traffic) {}
};

// Which transports there are: made and chosen here, and set up from Python with the memory that they need.

class Transports {
 public:
  Transports(Context& context, Communicators& communicators);

  // The best first; the last can gather everything.
  std::vector<std::unique_ptr<GatherTransport>> make_gathers(WeightMemory& memory);
  ReduceTransport& reduce() { return *reduce_; }

  // Memory of each rank that this one can write, of two halves, a multiple of staging_unit() bytes. See
  // [Note: one-sided reduce-scatter]. `group_name`: by which they are symmetric memory, on an accelerator.
  void set_staging(std::vector<at::Tensor> staging, const std::string& group_name, int64_t timeout_ms);
  int64_t staging_unit() const;
  // Barriers on devices, instead of torch's; see DeviceBarrier.
  void set_barrier(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words);
  // Debugging: see SlowLink, between hosts; 0: as fast as can be. `code`: of its kernel, on a device.
  void limit_cross_host_bandwidth(const std::optional<at::Tensor>& code, double bytes_per_s);
  // Kernels that add up what ranks have sent; see RowMeans.
  void set_mean_kernels(const at::Tensor& code);
  // Whether one of them has written, or added, the mean over the rows of `from` to `to`. For their tests:
  // nobody else can reach them alone.
  bool mean_rows(const at::Tensor& to, const at::Tensor& from, bool add) const {
    return means_(to, from, add);
  }

  // Of each rank's number of its turn; and on devices, where there is a barrier: the kernels of turns.cu, and
  // of each rank a number for each rank.
  std::unique_ptr<EpochLock> make_epoch_lock(std::vector<at::Tensor> numbers);
  std::unique_ptr<EpochLock> make_device_epoch_lock(const at::Tensor& code, std::vector<at::Tensor> pads);

  // With several hosts: what they exchange is announced to the ranks of this one that read it, see Arrivals;
  // on a CPU by numbers, on a device by kernels of arrivals.cu, after set_barrier() where that is called. Not
  // inside a graph.
  void set_remote_signals(std::vector<at::Tensor> numbers);
  void set_device_remote_signals(const at::Tensor& code, std::vector<at::Tensor> pads);

  // A stage of training or evaluation begins, on every rank: steps are counted alike from now on, although an
  // exception may have ended the stage before at another step on each.
  void begin_stage();
  // A training step begins, on every rank; returns its number.
  int64_t next_step() { return ++steps_; }
  // What ranks had missed of each other in an interrupted one is over.
  void begin_step(bool in_backward);
  // A backward was interrupted here, at another point than on peers: lets their devices through their
  // barriers.
  void release_barriers();
  void close();

 private:
  void use_collective_reduce();
  void set_reduce(std::unique_ptr<ReduceTransport> intra_host);  // and across hosts, where there are several

  Context& context_;
  Communicators& communicators_;
  std::unique_ptr<ReduceTransport> reduce_;
  RowMeans means_;
  std::shared_ptr<DeviceBarrier> barrier_;
  int64_t steps_ = 0;         // training steps begun, of the barrier and of turns
  bool interrupted_ = false;  // devices were let through their barriers
};

}  // namespace lightning_zero
