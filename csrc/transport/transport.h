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

#include <vector>

#include "param_registry.h"
#include "transport/pending.h"

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
  virtual at::Tensor source_in(ParamRecord& record, at::ScalarType dtype) = 0;
  // What is queued on the stream of weights from here on may read the copy in `dtype` of this rank, or of all
  // of its host where `of_peers`: before compiled code does, and after is_published().
  virtual void await_copy(ParamRecord& record, at::ScalarType dtype, bool of_peers) = 0;
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
  virtual bool needs_no_rank() const { return false; }
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
  virtual bool takes_mean(at::ScalarType dtype) const = 0;
  // Whether each gradient travels from memory of its own, and may be left where its owner has it.
  virtual bool wants_own_send_buffers() const = 0;
  // How many buckets of a dtype may be on their way before the caller's stream waits for the first.
  virtual int buckets_in_flight() const = 0;
  // Whether a bucket may leave before ranks have agreed that all have it.
  virtual bool leaves_early() const { return true; }

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

}  // namespace lightning_zero
