#include "gradients/agreement.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>

namespace lightning_zero {

namespace {

int64_t digest(const std::vector<int64_t>& arrivals) {
  int64_t digest = 1469598103934665603LL;
  for (auto index : arrivals)
    digest = static_cast<int64_t>((static_cast<uint64_t>(digest) ^ index) * 1099511628211ULL);
  return std::abs(digest / 2);
}

}  // namespace

Agreement::Agreed Agreement::agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals,
                                   int64_t barriers) {
  // What must be alike travels twice, once negative: the largest of both tells.
  const auto order = digest(arrivals);
  const auto first = flags.size();
  flags.insert(flags.end(), {order, -order, barriers, -barriers, to_say_ ? 1 : 0});
  if (control_ != nullptr) {
    control_->all_reduce_max(flags, "the agreement at the end of a backward pass");
    context_.count("agreements");
    // Signals carry no name: ranks that came to barriers at different times would add up what is not there
    // yet, without a word.
    TORCH_CHECK(
        flags[first + 2] == -flags[first + 3],
        "lightning_zero: an earlier backward pass was interrupted at different points on different ranks, so "
        "their gradients no longer fit together. Let the exception that interrupted it end the training on "
        "all "
        "ranks, and resume from a checkpoint.");
  }
  said_ = said_ || flags[first + 4] != 0;
  const bool same_order = flags[first] == -flags[first + 1];
  flags.resize(first);
  return {std::move(flags), same_order};
}

}  // namespace lightning_zero
