// Gathers weights for compiled and eager code, and tracks what changes them.
//
// gather() all-gathers a full weight into a new tensor on the stream of weights. The caller's stream waits
// before it uses the tensor, and the allocator reuses the memory in stream order. Any thread may call any
// method.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "context.h"
#include "transport/transport.h"
#include "weights/compute_shards.h"
#include "weights/gather.h"
#include "weights/host_exchange.h"
#include "weights/unsharded_cache.h"
#include "weights/user_writes.h"

namespace lightning_zero {

class Weights {
 public:
  Weights(Context& context, Transports& transports, Communicators& comms);

  // ---- ops
  at::Tensor gather(int64_t index, at::IntArrayRef shape, at::ScalarType dtype, bool tracked);
  at::Tensor gather_start(int64_t index, at::IntArrayRef shape, at::ScalarType dtype);
  // Gather several weights in one launch into one tensor of `numel` elements, one after the other, each
  // padded.
  at::Tensor gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel);
  // Return the whole weight in `dtype` from memory that this rank keeps until the next step; newly gathered
  // if there is none, or if a gradient may overwrite it before this backward has read it.
  at::Tensor view(int64_t index, at::IntArrayRef shape, at::ScalarType dtype);
  // Return a copy of the factor of gathers in fp8, a number.
  at::Tensor fp8_factor(int64_t index) const;
  // Raise the first numbers of a layer's fp8 matrix to these, which are 0-dim, if their memory is set.
  void note_fp8_health(int64_t index, int64_t matrix, at::TensorList numbers) const;
  // Gather weights that stay until the optimizer step into their memory, unless they are valid.
  void cached_gather_start(at::TensorList cache, at::TensorList shards);
  // Begin a compiled graph that gathers and reduces according to `plan`. All ranks must have that plan, and
  // the weights that it reads must be readable.
  void check_plan(const std::string& digest, const std::string& plan);

  // ---- changes of shards
  //
  // Announce that shards change, and that they have changed. Idempotent. Without an epoch lock,
  // begin_writing() invalidates compute shards and end_writing() does nothing. `stepping`: an optimizer
  // writes, which maintains the compute shards of shards on the host.
  void begin_writing(bool stepping);
  void end_writing();
  // Rewrite compute shards before their next use, because shards may have changed without a trace (a replayed
  // graph). No effect with an epoch lock or several hosts, where changes must be announced.
  void expire_compute_shards();
  // Begin a training step of compiled code: rewrite all compute shards, and prefetch the groups that the
  // previous step gathered first.
  void refresh_compute_shards();
  // Bring compute shards up to date and let work queued on the current stream read them. Collective if peers
  // read them. `ahead`: for a graph that is about to be captured; then only what the capture depends on,
  // which is not repeated before its replay, see ShardAccess::publish_before_capture(). Return true if
  // anything was done.
  bool sync_compute_shards(bool ahead = false);
  // Return the number of reads of weights whose gradient uses, or may soon use, the compute shard's memory.
  int64_t reads_of_gradients() const {
    Lock lock(context_.mutex);
    return context_.reads_of_gradients;
  }
  // Return the indices of the parameters that compiled code gathered in `dtype`.
  std::vector<int64_t> gathered_in(at::ScalarType dtype) const;

  // End a backward without gradients on this rank: gather what its peers gather, see [Note: a rank without
  // gradients].
  void repeat_gathers();
  GatherLog& log() { return log_; }

  // Set an op `(str digest, str plan) -> ()` that is called before the first graph with a new plan. It may
  // raise.
  void on_new_plan(std::string op) { new_plan_op_ = std::move(op); }

  ShardAccess& access() { return access_; }
  ComputeShards& compute_shards() { return compute_shards_; }
  UserWrites& user_writes() { return user_writes_; }
  UnshardedCache& unsharded_cache() { return unsharded_cache_; }
  GroupPrefetcher& prefetcher() { return prefetcher_; }
  // null with one host
  HostExchange* exchange() { return host_shards_ ? &host_shards_->exchange() : nullptr; }
  size_t watched() const { return user_writes_.watched(); }  // number of tracked weights
  void close();

 private:
  void sync_edits_if_any();
  void note(GatherLog::Kind kind, at::ScalarType dtype, const std::vector<ParamRecord*>& records,
            int64_t numel = 0);
  void repeat(const GatherLog::Entry& entry);

  Context& context_;
  ComputeShards compute_shards_;
  std::unique_ptr<HostShards> host_shards_;  // null with one host
  ShardAccess access_;
  Gatherer gatherer_;
  GroupPrefetcher prefetcher_;
  UnshardedCache unsharded_cache_;
  UserWrites user_writes_;
  GatherLog log_;
  std::string new_plan_op_;
  std::set<std::string> plans_;  // digests of the plans that all ranks are known to have
};

}  // namespace lightning_zero
