// The sharded parameters of an executor, their memory, and a table that finds them from a tensor.
//
// An op receives only a shard. Finding the parameter by its shard, instead of by an index in the graph, lets
// layers of equal shapes share one compiled graph. The table is the only process-wide state: ops have no
// other way to reach their executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/pending.h"

namespace lightning_zero {

class Executor;

// Context::shard_version and the parameter's version when a derived value was computed.
struct Stamp {
  int64_t shard_version = -1, version = -1;
  bool operator==(const Stamp&) const = default;
};

// Content of a parameter's compute-shard memory.
enum class ComputeShardState {
  WEIGHT,
  GRADIENT_PENDING,  // a gradient that this backward reduces or has reduced
  GRADIENT           // the gradient of an earlier backward, whether or not it is still attached
};

// A copy of this rank's shard, or of its host shard with several hosts. Undefined if there is none.
struct ShardCopy {
  at::Tensor local;
  std::vector<at::Tensor> by_rank;  // of every rank of the host, if this process can read them
  Stamp written;
  bool written_by_optimizer = false;  // see [Note: copies written by a step] in compute_shards.h
  // ---- gradient aliasing
  ComputeShardState state = ComputeShardState::WEIGHT;
  Pending last_read;              // the last read of `local` by this rank in this backward
  bool was_read = false;          // since grad_aliasing::begin_noting_reads()
  bool was_viewed = false;        // likewise, by graphs that read `local` itself
  bool gradient_arrived = false;  // in this backward
  // ---- host shards
  const std::string* name = nullptr;  // the parameter's name
  int64_t use_order = -1;             // position in the order of first use; negative: not used yet
  int64_t exchange_part = -1;         // part of the last exchange that holds it
};

// Padded memory in which the full parameter stays until the optimizer step. Undefined if the parameter is not
// cached.
struct CachedWeight {
  at::Tensor memory;
  Stamp filled;
};

// The sum of gradients of several backwards that is not reduced yet: the full gradient, or the host shard.
// See [Note: deferred gradients] in gradients/deferred.h. Undefined if nothing was ever deferred.
struct DeferredGradient {
  int64_t shards = 1;  // number of shards in a host shard
  at::Tensor memory;   // one-dimensional, in float32 or wider
  bool full = false;
  bool filled = false;   // holds a value that must still be reduced
  int64_t version = -1;  // version of the param.grad that represents it; negative: none
  // ---- if `full`
  void add(const at::Tensor& grad);
  at::Tensor values(int64_t numel) const { return memory.narrow(0, 0, numel); }  // without padding
  void clear() {
    filled = false;
    version = -1;
  }
};

struct ParamRecord {
  int64_t index = 0;
  std::string name;
  at::Tensor param;         // the user's nn.Parameter; its data is a reshaped view of `shard`
  at::Tensor shard;         // 1-D view of a flat buffer; the last ranks' shards end with zeros
  at::Tensor grad;          // 1-D view of the flat gradient buffer; undefined until training needs it
  at::Tensor visible_grad;  // `grad` in the shape of `param`; assigned to param.grad
  ShardCopy compute_shard;  // in the compute dtype, if that differs from the shard's
  // In the shard's dtype, for full-precision computation. Written and read together with the compute shard,
  // since shards change at times that peers do not know.
  ShardCopy full_precision_shard;
  // In fp8, divided by `fp8_factor`, which all ranks share. See [Note: fp8 shards] in
  // weights/compute_shards.h.
  ShardCopy fp8_shard;
  at::Tensor fp8_factor;  // a float32 number; undefined if no graph may gather the weight in fp8
  at::Tensor fp8_health;  // numbers of the layer's fp8 matrices, by row; undefined without the option
  std::set<at::ScalarType> gathered_in;  // dtypes in which compiled code gathered the weight
  std::vector<at::Tensor> shards;        // of every rank of the host, with an epoch lock
  CachedWeight cached;
  DeferredGradient deferred;
  std::vector<int64_t> shape;  // of the full parameter
  std::vector<int64_t> order;  // order of its dimensions in memory
  int64_t numel = 0;           // of the full parameter, without padding
  bool live = true;            // false after the last module released it
  bool on_host = false;        // the shard is in host memory
  bool trainable() const { return live && param.requires_grad(); }
  int64_t shard_numel() const { return shard.numel(); }
  // Return the size of the host shard, see [Note: hosts]; the shard's size with one host.
  int64_t host_shard_numel() const { return deferred.shards * shard_numel(); }
  // Return the host shard that is also the cached weight, with one rank per host; otherwise null.
  ShardCopy* cached_host_shard();
  // If the user assigned a tensor to param.grad, copy it to `grad`, so that it counts as accumulated so far.
  void accept_user_gradient();
  // Return true if `grad` uses the compute shard's memory, see [Note: gradient aliasing] in
  // gradients/grad_aliasing.h.
  bool is_grad_aliased() const {
    return grad.defined() && compute_shard.local.defined() &&
           grad.const_data_ptr() == compute_shard.local.const_data_ptr();
  }
  // Return true if param.grad is `grad`, which users or an optimizer may still read.
  bool holds_gradient() const {
    const auto& attached = param.grad();
    return attached.defined() && attached.const_data_ptr() == grad.const_data_ptr();
  }
  Stamp stamp(int64_t shard_version) const { return {shard_version, static_cast<int64_t>(param._version())}; }
  // Return elements of the weight in `dtype`: divided by the factor and clamped if that is fp8.
  at::Tensor cast(const at::Tensor& values, at::ScalarType dtype) const;
  // Return every rank's shard in `dtype` if this process can read them; otherwise an empty vector.
  const std::vector<at::Tensor>& peer_shards_in(at::ScalarType dtype) const;
};

struct ParamRef {
  Executor* executor;  // unregisters itself before its destruction
  int64_t index;
};

// Maps a shard's address to its parameter. Addresses are unique, because flat buffers keep every shard alive
// and nonempty until its executor unregisters it.
class ShardTable {
 public:
  static ShardTable& instance();
  void add(const at::Tensor& shard, ParamRef ref);
  void remove(const at::Tensor& shard);
  std::optional<ParamRef> find(const void* address);
  // Throw an error that names possible causes if the tensor is not a known shard.
  ParamRef find(const at::Tensor& shard, const char* op);

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, ParamRef> refs_;
};

// Return the weight in the memory of `flat`, which is one-dimensional and padded.
at::Tensor as_parameter(const at::Tensor& flat, int64_t numel, at::IntArrayRef shape);
// The variant for eager code, with the weight's own dimension order.
at::Tensor as_parameter(const at::Tensor& flat, const ParamRecord& record);

struct Context;
class Reducer;
class Weights;

class Parameters {
 public:
  // `executor`: stored in the shard table.
  Parameters(Context& context, Executor& executor, Weights& weights, Reducer& gradients)
      : context_(context), executor_(executor), weights_(weights), gradients_(gradients) {}

  // Return the parameter's index. `shape`: of the full parameter. `order`: its dimensions in memory order, by
  // default as in `shape`.
  int64_t add(std::string name, at::Tensor param, at::Tensor shard, std::vector<int64_t> shape,
              std::optional<std::vector<int64_t>> order);
  // Replace the shard's memory by one with equal values: shards move into a flat buffer after all are known.
  void move(int64_t index, at::Tensor shard);
  // Remove a parameter that no module reads, because it was tied to another while the model was built.
  void drop(int64_t index);
  // Wrap the user's hooks, see [Note: hooks on gradients]. Backward raises if autograd produces a gradient
  // for the shard itself. Call it again after the user's first hook, with which torch replaces all others.
  void install_gradient_hooks(int64_t index);

  // Set or remove the gradient memory. Legal between steps, when no gradient is in use.
  void set_grad(int64_t index, std::optional<at::Tensor> grad);
  // Set or remove memory for deferred gradients, see [Note: deferred gradients]. `full`: for the full
  // gradient instead of the host shard.
  void set_deferred_gradient(int64_t index, std::optional<at::Tensor> memory, bool full);
  void set_unsharded_cache(int64_t index, std::optional<at::Tensor> memory);
  void set_compute_shard(int64_t index, at::Tensor copy);
  // Set the number by which gathers in fp8 divide the weight, in memory that Python writes.
  void set_fp8_factor(int64_t index, at::Tensor factor);
  // Set memory for numbers of the layer's fp8 matrices: one row for each, float32.
  void set_fp8_health(int64_t index, at::Tensor memory);
  // Set a shard in fp8, and that of every rank if this process can read them, which needs an epoch lock.
  void set_fp8_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers);
  // The shard is in host memory, which the device reads over its link.
  void mark_on_host(int64_t index);
  // Compute shards in one tensor, of the shards in another, to be written by one kernel.
  void add_compute_shard_memory(at::Tensor copies, at::Tensor shards);
  // Set every rank's compute shard, in memory that this process can read. See [Note: copies from peers].
  void set_peer_compute_shards(int64_t index, std::vector<at::Tensor> peers);
  // Set a copy in the parameter's own dtype, and that of every rank.
  void set_full_precision_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers);
  // Set every rank's shard. Legal only with an epoch lock.
  void set_peer_shards(int64_t index, std::vector<at::Tensor> shards);

  // Remove all shards from the table.
  void unregister();

 private:
  // Return true if there is one tensor per rank of the host, with at least `numel` contiguous elements:
  // copies read them by address.
  bool covers_host(const std::vector<at::Tensor>& tensors, int64_t numel) const;

  Context& context_;
  Executor& executor_;
  Weights& weights_;
  Reducer& gradients_;
};

}  // namespace lightning_zero
