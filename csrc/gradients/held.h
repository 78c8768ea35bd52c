// Whole gradients of this rank that wait for the hooks of their parameters.
//
// [Note: hooks on gradients] A hook of register_hook() sees the gradient that this rank's backward computes,
// whole, before it is reduced, as in a plain module under DDP. So reduce() adds up the gradients of a
// parameter with hooks here. Autograd runs the hooks of a leaf, even for an undefined gradient, after
// everything that contributes to it: one of ours comes first and hands over the sum, the user's come next,
// and another of ours comes last, puts the result into a bucket, and returns none to autograd. Sums whose
// leaf autograd does not visit are handed over when the backward ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "param_registry.h"
#include "runtime/device.h"

namespace lightning_zero {

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

}  // namespace lightning_zero
