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
#include <string>
#include <unordered_map>
#include <vector>

namespace lightning_zero {

class Executor;

struct ParamRecord {
  int64_t index = 0;
  std::string name;
  at::Tensor param;         // the nn.Parameter that users hold; its data is `shard` in another shape
  at::Tensor shard;         // 1-D view of an arena: shard_numel elements, the tail of the last ranks zero
  at::Tensor grad;          // 1-D view of the gradient arena, same layout; undefined until training needs it
  at::Tensor visible_grad;  // the same in the parameter's shape: what param.grad is given, each time
  // The same values in the dtype that is computed in; undefined when nothing is computed in another.
  at::Tensor shadow;
  std::vector<at::Tensor> peers;  // every rank's shadow of this parameter, where they can be read from here
  // A copy in the shard's own dtype, for weights that are computed with in it, written and read like the
  // shadow: shards themselves change at times of which peers know nothing.
  at::Tensor exact;
  std::vector<at::Tensor> exact_peers;
  std::vector<at::Tensor> shards;  // every rank's, where ranks take turns to read and write them
  int64_t shadow_epoch = -1;       // as Context::epoch and param._version() were when it was written
  int64_t shadow_version = -1;
  // Memory for the whole parameter, padded, in which it stays until the optimizer steps; undefined where it
  // does not.
  at::Tensor kept;
  int64_t kept_epoch = -1;
  int64_t kept_version = -1;
  std::vector<int64_t> shape;  // the whole parameter's
  std::vector<int64_t> order;  // its dimensions as they lie in memory
  int64_t numel = 0;           // the whole parameter's, without padding
  bool live = true;            // false once no module reads it
  bool trainable() const { return live && param.requires_grad(); }
  int64_t shard_numel() const { return shard.numel(); }
  // The same values in `dtype` on every rank, where they can be read from here; empty where they cannot.
  const std::vector<at::Tensor>& copies_in(at::ScalarType dtype) const;
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
  bool contains(const void* address);
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

}  // namespace lightning_zero
