// The Executor gathers weights and reduces gradients for one engine. It is made of owners, each of a part of
// the state, and does itself only what concerns several of them:
//
//   parameters.h               which parameters there are
//   weights/weights.h          how whole weights come to code
//   gradients/reducer.h        how gradients come to their shards
//   activations.h              how activations leave for the host, and come back
//   cuda_graph/recorder.h      how both are replayed by graphs of the device
//   transport/communicators.h  the process groups, each with a stream of its own
//   transport/transports.h     what moves bytes between ranks
//
// All methods may be called from any thread; one lock is held over all owners (Context::mutex).
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "activations.h"
#include "context.h"
#include "cuda_graph/recorder.h"
#include "gradients/reducer.h"
#include "parameters.h"
#include "transport/transports.h"
#include "weights/weights.h"

namespace lightning_zero {

class Executor : public c10::intrusive_ptr_target {
 public:
  Executor(const Communicators::Names& groups, const std::string& device);
  ~Executor() override;

  // Legal outside backward.
  void configure(ExecutorOptions options);
  // Who watches over the waits for other ranks.
  void watch(c10::intrusive_ptr<Watchdog> watchdog);

  Parameters& parameters() { return parameters_; }
  Weights& weights() { return weights_; }
  Reducer& gradients() { return gradients_; }
  Activations& activations() { return activations_; }
  Recorder& graphs() { return graphs_; }
  Transports& transports() { return transports_; }
  int64_t epoch() const;  // changes when shards may have

  // See Transports. Legal outside backward.
  void set_staging(std::vector<at::Tensor> staging, const std::string& group_name, int64_t timeout_ms);
  // Shards lie in memory that all ranks can read, from now on: each rank's number of its turn. On every rank,
  // with a barrier before the next gather. See [Note: turns].
  void set_epoch_lock(std::vector<at::Tensor> numbers);
  // The same on devices: the kernels of turns.cu, and of each rank a number for each rank. After
  // set_barrier().
  void set_device_epoch_lock(const at::Tensor& code, std::vector<at::Tensor> rows);

  // See Transports.
  void begin_stage() { transports_.begin_stage(); }
  // A training step begins, on every rank: what ranks had missed of each other in an interrupted one is over.
  void begin_training_step();
  void abort_backward();  // drops what an interrupted backward left

  // What there is to count is said in native/executor.py.
  std::map<std::string, int64_t> counters() const;
  void reset_counters();
  int64_t size() const { return context_.size; }
  int64_t rank() const { return context_.rank; }
  void close();

 private:
  class Round;
  void begin_round();

  Context context_;
  Communicators communicators_;
  Transports transports_;
  Weights weights_;
  Reducer gradients_;
  Activations activations_;
  Recorder graphs_;
  Parameters parameters_;
};

}  // namespace lightning_zero
