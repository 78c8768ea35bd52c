// What ranks tell each other at the end of a backward, on the host: no device is read.
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
  // `control`: null where there is one rank.
  RankConsensus(Context& context, Communicator* control) : context_(context), control_(control) {}

  struct Result {
    std::vector<int64_t> flags;  // the largest of any rank
    bool same_order = true;      // of arrival, on all ranks
  };
  // `flags`: of this rank; as long on every rank. `barriers`: that there were before this backward. Throws
  // where ranks came to them at different times, or have read weights in another order than others.
  Result agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals, int64_t barriers);

  // Something that the agreements to come carry along; and whether, since the last question, some rank had
  // something to say.
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

// Gradients as users find them: which parameters have one, and where it lies.

class AttachedGradients {
 public:
  AttachedGradients(Context& context, const BucketLayout& layout) : context_(context), layout_(layout) {}

  // A backward has ended. `brought`: by parameter, whether it brought a gradient to some rank: then it gets
  // it. `deferred`: where that is deferred, what the parameter gets stands for it.
  void attach(const std::vector<char>& brought, const DeferredGradients& deferred);

  // Parameters with a gradient from the last backward.
  std::vector<int64_t> last_attached() const {
    Lock lock(context_.mutex);
    return attached_;
  }
  // Changes whenever a parameter's gradient comes, goes or lies elsewhere.
  int64_t key() const;
  // Whether the memory of this parameter's gradient is not a compute copy now.
  bool may_write_gradient(int64_t index) const;
  // Whether gradients are there, to which a backward that begins now would add.
  bool has_gradients() const;
  void close() { attached_.clear(); }

 private:
  Context& context_;
  const BucketLayout& layout_;
  std::vector<int64_t> attached_;
};

// Whole gradients of this rank that wait for the hooks of their parameters.
//
// [Note: hooks on gradients] A hook of register_hook() sees the gradient that this rank's backward computes,
// whole, before it is reduced, as in a plain module under DDP. So reduce() adds up the gradients of a
// parameter with hooks here. Autograd runs the hooks of a leaf, even for an undefined gradient, after
// everything that contributes to it: one of ours comes first and hands over the sum, the user's come next,
// and another of ours comes last, puts the result into a bucket, and returns none to autograd. Sums whose
// leaf autograd does not visit are handed over when the backward ends.

class HookedGradients {
 public:
  // `grad`: as the parameter lies in memory. `backward`: autograd's number of the one that brings it.
  void add(const ParamRecord& record, const at::Tensor& grad, int backward);
  // The sum, in the parameter's shape and dtype; undefined if there is none.
  at::Tensor take(const ParamRecord& record, int backward);
  // A parameter with a sum; empty if there is none.
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

  std::vector<Sum> sums_;  // in the order in which the last of each one's gradients came
};

// Puts our hooks around the user's. Raises, in backward, if autograd brings this rank's shard a gradient:
// something was computed with the shard itself.
void wrap_user_hooks(const ParamRecord& record);

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
  Reducer(Context& context, Transports& transports, Communicator* control, std::function<void()> on_begin);

  // -- ops
  // `borrow`: the caller leaves the gradient's memory alone until it calls release().
  void reduce(int64_t index, const at::Tensor& grad, bool zero_copy = false);
  void release(int64_t index);

  // -- hooks, see [Note: hooks on gradients]
  at::Tensor take_hooked_sum(int64_t index);                  // before the user's
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
  void on_backward_end(std::string op) { end_hook_op_ = std::move(op); }
  // Called at the end of each backward: `brought`: gradients, on this rank. Before ranks agree.
  void before_end(std::function<void(bool brought)> callback) { before_end_ = std::move(callback); }
  void abort();            // drops what an interrupted backward left
  void release_buffers();  // bucket memory; legal outside backward

  DeferredGradients& deferred() { return deferred_; }
  AttachedGradients& attached() { return attached_; }
  int64_t completed_backwards() const {  // that have ended
    Lock lock(context_.mutex);
    return completed_backwards_;
  }
  RankConsensus& consensus() { return consensus_; }

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
  void put_in_bucket(ParamRecord& record, const at::Tensor& grad, bool zero_copy);
  void add_hooked(const ParamRecord& record, const at::Tensor& grad);
  void run_hooks();  // of what autograd has not visited
  void open(ReduceBucket& bucket, bool adding);
  void launch(size_t number, bool late = false);
  void launch_before_consensus();
  void launch_wanted(const std::vector<int64_t>& wanted);
  void prepare_layout();
  RankConsensus::Result agree();
  // What this backward has brought, of whatever segment, is sent, and attached. `learning`: its order counts.
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
