// What an executor does with gradients: reduce() copies one into its bucket on the caller's stream. Complete
// buckets are reduced in one fixed order on the gradients' stream and accumulated into the gradient arena
// there. When autograd finishes, end_backward() makes the ranks agree on what is still missing, sends it,
// lets the caller's stream wait once, and attaches param.grad.
//
// [Note: one order on every rank] A rank may see gradients its peers do not. Buckets are therefore launched
// strictly in order, a bucket that is not complete holds back the ones behind it, and end_backward() takes
// the maximum over ranks of what arrived (on a host group: no device is read) before it launches the rest. A
// gradient that arrives after its bucket was launched (a weight used in two graphs) waits in a second bucket
// that is launched after the agreement.
//
// State is per parameter and backward, never per graph. All methods may be called from autograd's threads.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "context.h"
#include "gradients/agreement.h"
#include "gradients/attached.h"
#include "gradients/held.h"
#include "gradients/layout.h"
#include "transport/transports.h"

namespace lightning_zero {

// What is known of the backward that goes on, or went on last.
struct Backward {
  std::vector<int> tasks;         // autograd's, that will call end_backward()
  std::vector<int64_t> arrivals;  // parameters, in order
  std::vector<size_t> marks;      // how many had arrived where one segment ended, and another began
  size_t next_launch = 0;
  int64_t segment = -1;  // of what was launched last
  // While a graph is recorded: whether its gradients are added to those that are there.
  std::optional<bool> recorded_adding;
  bool goes_on() const { return !tasks.empty(); }
};

class Reducer {
 public:
  // `control`: where ranks agree; null where there is one. `begun`: autograd has begun to bring gradients;
  // the callee sees to it that end_backward() is called when it ends.
  Reducer(Context& context, Transports& transports, Communicator* control, std::function<void()> begun);

  // -- ops
  // `borrow`: the caller leaves the gradient's memory alone until it calls release().
  void reduce(int64_t index, const at::Tensor& grad, bool borrow = false);
  void release(int64_t index);

  // -- hooks, see [Note: hooks on gradients]
  at::Tensor take_held(int64_t index);                          // before the user's
  void reduce_hooked(int64_t index, const at::Tensor& grad);  // after them; in the parameter's shape

  // Here a compiled graph's backward begins, or ends; see [Note: segments of a backward]. Whether a gradient
  // has come since the last mark.
  bool mark();
  // The number of what ended at the last mark, by which Segments knows it.
  int64_t segment();

  void end_backward();
  // A backward has reached no weight on this rank, but may have on others: ends as theirs do.
  void end_empty_backward();
  // Name of an op `() -> ()` that runs Python hooks on gradients after they are attached; "" for none.
  void on_abort(std::string op) { end_op_ = std::move(op); }
  // Called at the end of each backward: `brought`: gradients, on this rank. Before ranks agree.
  void before_end(std::function<void(bool brought)> callback) { before_end_ = std::move(callback); }
  void abort();            // drops what an interrupted backward left
  void release_buffers();  // bucket memory; legal outside backward

  DeferredGradients& deferred() { return deferred_; }
  AttachedGradients& attached() { return attached_; }
  int64_t completed_backwards() const {  // that have ended
    Lock lock(context_.mutex);
    return backwards_;
  }
  Agreement& agreement() { return agreement_; }

  // -- for the other owners, which hold the lock
  Backward& backward() { return backward_; }
  BucketLayout& layout() { return layout_; }
  BufferPools& pools() { return pools_; }
  // A gradient comes, or all that a graph brings.
  void join();
  void launch_complete();
  // Everything that lies before this bucket, whatever has come of it.
  void launch_before(size_t bucket);
  void add_counters(std::map<std::string, int64_t>& counters) const;
  void close();

 private:
  std::unique_ptr<BufferPool> make_pool(at::ScalarType dtype) const;
  void begin();  // at the first gradient since the last end, or at an end without one
  void take(ParamRecord& record, const at::Tensor& grad, bool borrow);
  void hold(const ParamRecord& record, const at::Tensor& grad);
  void run_hooks();  // of what autograd has not visited
  void open(ReduceBucket& bucket, bool adding);
  void launch(size_t number, bool late = false);
  void launch_all();
  void launch_agreed(const std::vector<int64_t>& wanted);
  void prepare_layout();
  Agreement::Agreed agree();
  // What this backward has brought, of whatever segment, is sent, and attached. `learning`: its order counts.
  void end(bool learning);
  void finish();

  Context& context_;
  Transports& transports_;
  std::function<void()> begun_;
  std::function<void(bool)> before_end_;
  std::string end_op_;
  BucketLayout layout_;
  BufferPools pools_;
  PoolStats pool_stats_;
  Agreement agreement_;
  Backward backward_;
  HeldGradients held_;
  DeferredGradients deferred_;
  AttachedGradients attached_;
  int64_t backwards_ = 0;
};

}  // namespace lightning_zero
