// What the executor knows of each sharded parameter, and the table that finds it from a tensor.
//
// An op receives only a shard. Finding the parameter by the shard itself, rather than by a number baked
// into the graph, lets all layers of one shape share one compiled graph. The table is the one piece of
// process-wide state: ops have no other way to their executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "context.h"
#include "transport/pending.h"

namespace lightning_zero {

class Executor;

// As Context::epoch and a parameter's version were when something was made of its values.
struct Stamp {
  int64_t shard_version = -1, version = -1;
  bool operator==(const Stamp&) const = default;
};

// What lies where a parameter's compute copy belongs.
enum class ComputeShardState {
  WEIGHT,
  GRADIENT_PENDING,  // one that this backward reduces, or has
  GRADIENT           // one that a backward has left, whether anybody still wants it or not
};

// A copy of this rank's shard; with several hosts, of its host shard. Undefined where there is none.
struct ShardCopy {
  at::Tensor local;
  std::vector<at::Tensor> by_rank;  // of every rank of the host, where they can be read from here
  Stamp written;
  bool written_by_optimizer = false;  // see [Note: shards on the host] in compute_copies.h
  // -- where gradients lie over copies
  ComputeShardState state = ComputeShardState::WEIGHT;
  Pending last_read;      // of it, by this rank, in this backward
  bool was_read = false;  // since note_reads()
  // -- of a host shard
  const std::string* name = nullptr;  // the parameter's
  int64_t use_order = -1;             // in the order of first use; negative: not used yet
  int64_t exchange_part = -1;         // of the exchange that was begun last
};

// Memory for the whole parameter, padded, in which it stays until the optimizer steps. Undefined where it
// does not.
struct ResidentWeight {
  at::Tensor memory;
  Stamp filled;
};

// What several backwards have brought and is still to be reduced: whole, or the host shard's part of it. See
// [Note: deferred gradients] in gradients/deferred.h. Undefined where nothing was ever deferred.
struct DeferredGradient {
  int64_t shards = 1;  // in a host shard
  at::Tensor memory;   // 1-D, in float32 or what is wider
  bool whole = false;
  bool filled = false;   // it holds something that is still to be reduced
  int64_t version = -1;  // of the param.grad that stands for it; negative: none does yet
  // -- where it is whole
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
  at::Tensor param;         // the nn.Parameter that users hold; its data is `shard` in another shape
  at::Tensor shard;         // 1-D view of an arena: shard_numel elements, the tail of the last ranks zero
  at::Tensor grad;          // 1-D view of the gradient arena, same layout; undefined until training needs it
  at::Tensor visible_grad;  // the same in the parameter's shape: what param.grad is given, each time
  ShardCopy compute_shard;  // in the dtype that is computed in, if that is another
  // In the shard's own dtype, for weights that are computed with in it. Written, and read, with the compute
  // copy: shards themselves change at times of which peers know nothing.
  ShardCopy full_precision_shard;
  std::vector<at::Tensor> shards;  // every rank's, where ranks take turns to read and write them
  ResidentWeight resident;
  DeferredGradient deferred;
  std::vector<int64_t> shape;  // the whole parameter's
  std::vector<int64_t> order;  // its dimensions as they lie in memory
  int64_t numel = 0;           // the whole parameter's, without padding
  bool live = true;            // false once no module reads it
  bool trainable() const { return live && param.requires_grad(); }
  int64_t shard_numel() const { return shard.numel(); }
  // Of the host shard, see [Note: hosts]; where there is one host, that is the shard.
  int64_t host_shard_numel() const { return deferred.shards * shard_numel(); }
  // The host shard that is the resident weight, too: where there is one rank on each host. Null elsewhere.
  ShardCopy* resident_host_shard();
  // Somebody may have put a tensor of their own into param.grad; it counts as what has been accumulated so
  // far.
  void accept_user_gradient();
  // Whether `grad` is the compute copy's memory: see [Note: gradients over copies] in over_copies.h.
  bool is_grad_aliased() const {
    return grad.defined() && compute_shard.local.defined() &&
           grad.const_data_ptr() == compute_shard.local.const_data_ptr();
  }
  // Whether users, or an optimizer, may still read the gradient in `grad`.
  bool holds_gradient() const {
    const auto& held = param.grad();
    return held.defined() && held.const_data_ptr() == grad.const_data_ptr();
  }
  Stamp stamp(int64_t shard_version) const { return {shard_version, static_cast<int64_t>(param._version())}; }
  // The same values in `dtype` on every rank, where they can be read from here; empty where they cannot.
  const std::vector<at::Tensor>& peer_shards_in(at::ScalarType dtype) const;
};

struct ParamRef {
  Executor* executor;  // unregisters itself before it dies
  int64_t index;
};

// shard address -> parameter. Addresses are unique because arenas keep every shard alive, and non-empty,
// until its executor unregisters it.
class ShardTable {
 public:
  static ShardTable& instance();
  void add(const at::Tensor& shard, ParamRef ref);
  void remove(const at::Tensor& shard);
  std::optional<ParamRef> find(const void* address);
  // Throws an error that tells the user what may have replaced the shard.
  ParamRef find(const at::Tensor& shard, const char* op);

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, ParamRef> refs_;
};

// The weight in memory of `flat`, which is 1-D and padded.
at::Tensor as_parameter(const at::Tensor& flat, int64_t numel, at::IntArrayRef shape);
// The same for code that is not compiled, which sees the weight's own dimensions however they lie in memory.
at::Tensor as_parameter(const at::Tensor& flat, const ParamRecord& record);

// The parameters that an executor knows, by their numbers, and the memory that belongs to each.

struct Context;
class Reducer;
class Weights;

class Parameters {
 public:
  // `executor`: who is found by their shards.
  Parameters(Context& context, Executor& executor, Weights& weights, Reducer& gradients)
      : context_(context), executor_(executor), weights_(weights), gradients_(gradients) {}

  // Returns its number. `shape`: the whole parameter's; `order`: that of its dimensions in memory, by default
  // their own.
  int64_t add(std::string name, at::Tensor param, at::Tensor shard, std::vector<int64_t> shape,
              std::optional<std::vector<int64_t>> order);
  // Another piece of memory with the same values: shards move into an arena once all are known.
  void move(int64_t index, at::Tensor shard);
  // Nobody reads it any more: it was tied to another while the model was built.
  void drop(int64_t index);
  // Puts hooks of ours around the user's, see [Note: hooks on gradients]: backward raises if autograd brings
  // this shard a gradient. Again after the first of the user's hooks, which torch puts in place of all
  // others.
  void install_gradient_hooks(int64_t index);

  // Without memory: it is to lie elsewhere, and nothing holds that where it lay. Between steps.
  void set_grad(int64_t index, std::optional<at::Tensor> grad);
  // See [Note: deferred gradients]. `whole`: for the whole gradient, and not for the host shard's.
  // Without memory: there is none any more, as of weights that stay.
  void set_deferred_gradient(int64_t index, std::optional<at::Tensor> memory, bool whole);
  void set_resident(int64_t index, std::optional<at::Tensor> memory);
  void set_compute_shard(int64_t index, at::Tensor copy);
  // Its shard lies in the host's memory, which the device reads over its link.
  void mark_on_host(int64_t index);
  // Compute copies in one tensor, of the shards in another: written in one kernel.
  void add_compute_shard_memory(at::Tensor copies, at::Tensor shards);
  // The parameter's compute copy on every rank, in memory that this process can read. See [Note: copies from
  // peers].
  void set_peer_compute_shards(int64_t index, std::vector<at::Tensor> peers);
  // The same for a copy in the parameter's own dtype.
  void set_full_precision_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers);
  // The parameter's shard on every rank. Only where ranks take turns.
  void set_peer_shards(int64_t index, std::vector<at::Tensor> shards);

  // No shard is found any more.
  void unregister();

 private:
  // One of each rank of the host, each with at least `numel` elements: copies read them by address.
  bool covers_host(const std::vector<at::Tensor>& tensors, int64_t numel) const;

  Context& context_;
  Executor& executor_;
  Weights& weights_;
  Reducer& gradients_;
};

}  // namespace lightning_zero
