// What a training step's compiled code gathers first is fetched as the step begins, before Dynamo has checked
// its guards.
#pragma once

#include <deque>
#include <vector>

#include "context.h"
#include "weights/gatherer.h"

namespace lightning_zero {

// Weights that are fetched in one launch into one tensor: weight i, padded, behind weight i - 1.
struct GatherGroup {
  std::vector<ParamRecord*> records;
  at::ScalarType dtype;
  int64_t numel;
  bool operator==(const GatherGroup&) const = default;
};

// Such a fetch that has begun. `sources` must live until it has arrived.
struct PendingGroup {
  GatherGroup group;
  at::Tensor buffer;
  Pending pending;
};
PendingGroup start_gather(Gatherer& gatherer, GatherGroup group, std::vector<at::Tensor>& sources);

class GroupPrefetcher {
 public:
  GroupPrefetcher(Context& context, Gatherer& gatherer) : context_(context), gatherer_(gatherer) {}

  // A training step begins: fetches what the last one's graph fetched first. `noting`: and watches what this
  // one's does.
  void begin_step(bool recording);
  // Another compiled graph begins: only one graph's groups are noted.
  void begin_graph() { recording_ = recording_ && recorded_.empty(); }
  // The group, if it has been on its way since the step began; otherwise undefined.
  at::Tensor take(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel);
  // What is on its way is of values that change, or is not wanted.
  void drop();
  void forget();

 private:
  Context& context_;
  Gatherer& gatherer_;
  std::vector<GatherGroup> recorded_;  // as the last step showed
  bool recording_ = false;
  std::deque<PendingGroup> pending_;
};

}  // namespace lightning_zero
