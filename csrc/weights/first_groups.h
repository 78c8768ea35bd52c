// What a training step's compiled code gathers first is fetched as the step begins, before Dynamo has checked
// its guards.
#pragma once

#include <deque>
#include <vector>

#include "context.h"
#include "weights/gatherer.h"

namespace lightning_zero {

// Weights that are fetched in one launch into one tensor: weight i, padded, behind weight i - 1.
struct Group {
  std::vector<ParamRecord*> records;
  at::ScalarType dtype;
  int64_t numel;
  bool operator==(const Group&) const = default;
};

// Such a fetch that has begun. `sources` must live until it has arrived.
struct Fetch {
  Group group;
  at::Tensor buffer;
  Pending pending;
};
Fetch start(Gatherer& gatherer, Group group, std::vector<at::Tensor>& sources);

class FirstGroups {
 public:
  FirstGroups(Context& context, Gatherer& gatherer) : context_(context), gatherer_(gatherer) {}

  // A training step begins: fetches what the last one's graph fetched first. `noting`: and watches what this
  // one's does.
  void begin_step(bool noting);
  // Another compiled graph begins: only one graph's groups are noted.
  void begin_graph() { noting_ = noting_ && first_.empty(); }
  // The group, if it has been on its way since the step began; otherwise undefined.
  at::Tensor take(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel);
  // What is on its way is of values that change, or is not wanted.
  void drop();
  void forget();

 private:
  Context& context_;
  Gatherer& gatherer_;
  std::vector<Group> first_;  // as the last step showed
  bool noting_ = false;
  std::deque<Fetch> ahead_;
};

}  // namespace lightning_zero
