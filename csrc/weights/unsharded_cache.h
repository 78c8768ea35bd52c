// Weights that stay unsharded in their own memory until the optimizer step.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "context.h"
#include "weights/compute_shards.h"
#include "weights/gather.h"

namespace lightning_zero {

class UnshardedCache {
 public:
  UnshardedCache(Context& context, ShardAccess& access, Gatherer& gatherer)
      : context_(context), access_(access), gatherer_(gatherer) {}

  // For compiled code: gather weights into their memory `cache`, unless they are valid.
  void start(at::TensorList cache, at::TensorList shards);
  void wait(at::TensorList shards);
  // For eager code, while serve_eager() is on: copy a cached weight of this dtype into `flat`, which is
  // allocated if undefined. Gather the weight first if it is not valid. Return true if it was copied.
  bool read(ParamRecord& record, at::ScalarType dtype, at::Tensor& flat);
  void serve_eager(bool on);
  // Apply a write of eager code to the cached weight.
  void apply_user_write(ParamRecord& record, const at::Tensor& flat) const;
  bool has_pending() const { return !pending_.empty(); }
  void close() { pending_.clear(); }

  // ---- captures, see [Note: CUDA graphs]
  //
  // Indices of the weights that a captured graph gathers, and of those that must be valid before.
  struct Recorded {
    std::vector<int64_t> gathered, found;
  };
  void begin_recording() { recording_.emplace(); }
  // The capture gathered nothing, so its weights are not valid.
  Recorded end_recording();
  void mark_not_run(const Recorded& graph);
  // Return true if a replay finds the weights it needs. `gathered`: weights that earlier graphs gather; the
  // graph's own are added.
  bool has_inputs(const Recorded& graph, std::set<int64_t>& gathered) const;
  void after_replay(const Recorded& graph);

 private:
  // A host shard arrives with the others, see ShardAccess::publish(). Only eager code gathers again, since it
  // may find the host shard stale.
  bool is_filled(ParamRecord& record) const;
  void note_filled(ParamRecord& record) const;
  void wait_for(int64_t index, bool compiled);

  Context& context_;
  ShardAccess& access_;
  Gatherer& gatherer_;
  // Gathers that no one has waited for, by parameter.
  struct PendingGather {
    Pending pending;
    std::vector<at::Tensor> sources;
  };
  std::unordered_map<int64_t, std::shared_ptr<PendingGather>> pending_;
  std::optional<Recorded> recording_;
  bool serves_eager_ = false;
};

}  // namespace lightning_zero
