// Reduces gradients. reduce() copies a gradient into its bucket on the caller's stream. Complete buckets are
// reduced in a fixed order on the stream of gradients and accumulated into the flat gradient buffer. When
// autograd finishes, end_backward() lets ranks agree on missing gradients, launches the remaining buckets,
// makes the caller's stream wait once, and attaches param.grad.
//
// [Note: one order on every rank] A rank may have gradients that its peers lack. So buckets are launched
// strictly in order, and an incomplete bucket delays later ones. end_backward() takes the maximum over ranks
// of the arrived gradients, on a CPU group without device synchronization, before it launches the rest. A
// gradient that arrives after the launch of its bucket (a weight used in two graphs) goes to a late bucket,
// which is launched after the consensus.
//
// State is per parameter and backward, never per graph. Autograd's threads may call any method.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "cuda/streams.h"
#include "gradients/deferred.h"
#include "gradients/layout.h"
#include "transport/communicator.h"
#include "transport/transport.h"
#include "weights/param_registry.h"

namespace lightning_zero {

class RankConsensus {
 public:
  // Agreement of all ranks at the end of a backward, on the host and without device reads. `control`: null
  // with one rank.
  RankConsensus(Context& context, Communicator* control) : context_(context), control_(control) {}

  struct Result {
    std::vector<int64_t> flags;  // maximum over ranks
    bool same_order = true;      // gradients arrived in the same order on all ranks
  };
  // `flags`: of this rank, with the same length on every rank. `barriers`: number of barriers before this
  // backward. Raise if ranks passed barriers at different times or read weights in different orders.
  Result agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals, int64_t barriers);

  // set_flag() attaches a flag to the next agreements. take_flag() returns true if some rank set it since the
  // last call.
  void set_flag(bool yes) {
    Lock lock(context_.mutex);
    flag_ = yes;
  }
  bool take_flag() {
    Lock lock(context_.mutex);
    return std::exchange(any_flag_, false);
  }

 private:
  [[noreturn]] void raise_order_mismatch(int64_t mine);

  Context& context_;
  Communicator* control_;
  bool flag_ = false, any_flag_ = false;
};

// Attaches gradients to param.grad, and describes the attached ones.
class AttachedGradients {
 public:
  AttachedGradients(Context& context, const BucketLayout& layout) : context_(context), layout_(layout) {}

  // End a backward. `has_gradient`: by parameter, whether some rank had a gradient, which is then attached.
  // `deferred`: while it is on, param.grad represents the deferred gradient.
  void attach(const std::vector<char>& has_gradient, const DeferredGradients& deferred);

  // Return the parameters with a gradient from the last backward.
  std::vector<int64_t> last_attached() const {
    Lock lock(context_.mutex);
    return attached_;
  }
  // Return a hash that changes whenever a parameter's gradient is attached, detached or moved.
  int64_t attachment_key() const;
  // Return true if the memory of this parameter's gradient does not hold a compute shard now.
  bool may_write_gradient(int64_t index) const;
  // Return true if gradients exist, to which a new backward would add.
  bool has_gradients() const;
  void close() { attached_.clear(); }

 private:
  Context& context_;
  const BucketLayout& layout_;
  std::vector<int64_t> attached_;
};

// Full gradients of this rank that wait for the hooks of their parameters.
//
// [Note: hooks on gradients] A hook of register_hook() sees the full gradient of this rank before it is
// reduced, as in a plain module under DDP. reduce() therefore sums the gradients of parameters with hooks
// here. Autograd runs the hooks of a leaf after all its contributions, even with an undefined gradient. The
// first hook is ours and returns the sum. The user's hooks follow. The last hook is ours, puts the result
// into a bucket, and returns no gradient. Sums of leaves that autograd does not visit are processed when the
// backward ends.
class HookedGradients {
 public:
  // `grad`: with the parameter's dimension order in memory. `backward`: autograd's graph task id.
  void add(const ParamRecord& record, const at::Tensor& grad, int backward);
  // Return the sum in the parameter's shape and dtype; undefined if there is none.
  at::Tensor take(const ParamRecord& record, int backward);
  // Return a parameter with a sum; empty if there is none.
  std::optional<int64_t> next(int backward) const;
  void clear() { sums_.clear(); }

 private:
  struct Sum {
    int backward;
    int64_t index;
    at::Tensor flat;
    Fence added;  // to `flat`
  };
  std::vector<Sum>::iterator find(int64_t index, int backward);

  std::vector<Sum> sums_;  // in the order of each parameter's last gradient
};

// Wrap the user's hooks with ours. Backward raises if autograd computes a gradient for the shard itself,
// because the user computed with the shard.
void wrap_user_hooks(const ParamRecord& record);

// State of the running, or last, backward.
struct Backward {
  std::vector<int> tasks;         // autograd's graph tasks that will call end_backward()
  std::vector<int64_t> arrivals;  // indices of parameters, in order
  std::vector<size_t> marks;      // number of arrivals at the end of each segment
  size_t next_launch = 0;
  int64_t segment = -1;  // of the last launch
  // During a capture: whether gradients are added to existing ones.
  std::optional<bool> recorded_adding;
  bool goes_on() const { return !tasks.empty(); }
};

class Reducer {
 public:
  // `control`: for the consensus; null with one rank. `on_begin`: called at the first gradient of a backward;
  // it must arrange that end_backward() is called at the end.
  Reducer(Context& context, Transports& transports, Communicator* control, std::function<void()> on_begin);

  // ---- ops
  //
  // `zero_copy`: the caller does not modify the gradient's memory until it calls release().
  void reduce(int64_t index, const at::Tensor& grad, bool zero_copy = false);
  void release(int64_t index);

  // ---- hooks, see [Note: hooks on gradients]
  at::Tensor take_hooked_sum(int64_t index);                  // before the user's hooks
  void reduce_hooked(int64_t index, const at::Tensor& grad);  // after them; in the parameter's shape

  // Mark the beginning or end of a compiled graph's backward, see [Note: segments of a backward]. Return true
  // if gradients arrived since the last mark.
  bool mark();
  // Return the id of the segment that ended at the last mark.
  int64_t segment();

  void end_backward();
  // End a backward that reached no weight on this rank, but may have on others.
  void end_empty_backward();
  // Set an op `() -> ()` that runs Python hooks on gradients after they are attached; "" for none.
  void on_backward_end(std::string op) { end_hook_op_ = std::move(op); }
  // Set a callback for the end of each backward, before the consensus. `has_gradients`: this rank has
  // gradients.
  void before_end(std::function<void(bool has_gradients)> callback) { before_end_ = std::move(callback); }
  void abort();            // drop the state of an interrupted backward
  void release_buffers();  // free bucket memory; legal outside backward

  DeferredGradients& deferred() { return deferred_; }
  AttachedGradients& attached() { return attached_; }
  int64_t completed_backwards() const {  // number of backwards that have ended
    Lock lock(context_.mutex);
    return completed_backwards_;
  }
  RankConsensus& consensus() { return consensus_; }

  // ---- for other parts, which hold the lock
  Backward& backward() { return backward_; }
  BucketLayout& layout() { return layout_; }
  BufferPools& pools() { return pools_; }
  // Join the running backward, at a gradient or at a replay.
  void join();
  // Launch the next buckets that are complete. `may_clear_weights`: see ReduceBucket::clears_weights().
  void launch_complete(bool may_clear_weights = true);
  // Launch all buckets before this one, complete or not.
  void launch_before(size_t bucket);
  void add_counters(std::map<std::string, int64_t>& counters) const;
  void close();

 private:
  std::unique_ptr<BufferPool> make_pool(at::ScalarType dtype) const;
  void begin();  // at the first gradient of a backward, or at the end of one without gradients
  void put_in_bucket(ParamRecord& record, const at::Tensor& grad, bool zero_copy);
  void add_hooked(const ParamRecord& record, const at::Tensor& grad);
  void run_hooks();  // of leaves that autograd has not visited
  void open(ReduceBucket& bucket, bool adding);
  void launch(size_t number, bool late = false);
  void launch_before_consensus();
  void launch_wanted(const std::vector<int64_t>& wanted);
  void prepare_layout();
  RankConsensus::Result agree();
  // Send and attach all gradients of this backward. `learning`: learn from the order of arrivals.
  void end(bool learning);
  void finish();

  Context& context_;
  Transports& transports_;
  std::function<void()> on_begin_;
  std::function<void(bool)> before_end_;
  std::string end_hook_op_;
  BucketLayout layout_;
  BufferPools pools_;
  PoolStats pool_stats_;
  RankConsensus consensus_;
  Backward backward_;
  HookedGradients hooked_;
  DeferredGradients deferred_;
  AttachedGradients attached_;
  int64_t completed_backwards_ = 0;
};

}  // namespace lightning_zero
