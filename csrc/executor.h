// The Executor gathers weights and reduces gradients for one engine. It consists of parts, each of which owns
// some state, and implements only operations on several parts:
//
//   weights/param_registry.h   the parameters and their memory
//   weights/weights.h          gathers weights for compiled and eager code
//   gradients/reducer.h        reduces gradients into their shards
//   activation_offload.h       moves activations to host memory and back
//   cuda/graph_recorder.h      captures both into CUDA graphs and replays them
//   transport/communicator.h   the process groups, each with its own stream
//   transport/transport.h      the transports that move bytes between ranks
//
// Any thread may call any method. One lock guards all parts (Context::mutex).
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "activation_offload.h"
#include "context.h"
#include "cuda/graph_recorder.h"
#include "gradients/reducer.h"
#include "transport/transport.h"
#include "weights/param_registry.h"
#include "weights/weights.h"

namespace lightning_zero {

class Executor : public c10::intrusive_ptr_target {
 public:
  Executor(const Communicators::Names& groups, const std::string& device);
  ~Executor() override;

  // Apply options. Legal only outside backward.
  void configure(ExecutorOptions options);
  // Set the watchdog for all waits for other ranks.
  void watch(c10::intrusive_ptr<Watchdog> watchdog);

  Parameters& parameters() { return parameters_; }
  Weights& weights() { return weights_; }
  Reducer& gradients() { return gradients_; }
  ActivationOffload& activations() { return activations_; }
  GraphRecorder& graphs() { return graphs_; }
  Transports& transports() { return transports_; }
  int64_t shard_version() const;  // increases whenever shards may have changed

  // See Transports. Legal only outside backward.
  void set_staging(std::vector<at::Tensor> staging, const std::string& group_name, int64_t timeout_ms);
  // Let all ranks of the host read the shards, guarded by an epoch lock, see [Note: epoch lock]. `numbers`:
  // each rank's counter. Every rank must call this, followed by a barrier before the next gather.
  void set_epoch_lock(std::vector<at::Tensor> numbers);
  // The device variant. `code`: signal_kernels.cu; `pads`: each rank's signal pad. Legal after set_barrier().
  void set_device_epoch_lock(const at::Tensor& code, std::vector<at::Tensor> pads);

  // See Transports.
  void begin_stage() { transports_.begin_stage(); }
  // Begin a training step on every rank. Ranks do not wait for parts of an interrupted step that others
  // missed.
  void begin_training_step();
  void abort_backward();  // Drop the state of an interrupted backward.

  // Return the counters that native/executor.py documents.
  std::map<std::string, int64_t> counters() const;
  void reset_counters();
  int64_t size() const { return context_.size; }
  int64_t rank() const { return context_.rank; }
  void close();

 private:
  class BackwardGuard;
  void guard_backward();

  Context context_;
  Communicators communicators_;
  Transports transports_;
  Weights weights_;
  Reducer gradients_;
  ActivationOffload activations_;
  GraphRecorder graphs_;
  Parameters parameters_;
};

}  // namespace lightning_zero
