#include "gradients/agreement.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>

namespace lightning_zero {

namespace {

int64_t digest(const std::vector<int64_t>& arrivals) {
  int64_t digest = 1469598103934665603LL;
  for (auto index : arrivals)
    digest = static_cast<int64_t>((static_cast<uint64_t>(digest) ^ index) * 1099511628211ULL);
  return std::abs(digest / 2);
}

}  // namespace

RankConsensus::Result RankConsensus::agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals,
                                   int64_t barriers) {
  // What must be alike travels twice, once negative: the largest of both tells.
  const auto order = digest(arrivals);
  const auto first = flags.size();
  const auto reads = static_cast<int64_t>(std::exchange(context_.eager_read_hash, 0) >> 2);
  flags.insert(flags.end(), {order, -order, barriers, -barriers, flag_ ? 1 : 0, reads, -reads});
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
    // Replicas read by themselves, each as it likes.
    if (!context_.replicated && flags[first + 5] != -flags[first + 6])
      raise_order_mismatch(reads);
  }
  any_flag_ = any_flag_ || flags[first + 4] != 0;
  const bool same_order = flags[first] == -flags[first + 1];
  flags.resize(first);
  return {std::move(flags), same_order};
}

// All ranks come here.
void RankConsensus::raise_order_mismatch(int64_t mine) {
  std::vector<int64_t> all(static_cast<size_t>(context_.size), -1);
  all[static_cast<size_t>(context_.rank)] = mine;
  control_->all_reduce_max(all, "in which order ranks have read weights");
  std::map<int64_t, std::string> ranks;  // by order
  for (size_t rank = 0; rank < all.size(); ++rank) {
    auto& text = ranks[all[rank]];
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  std::string groups;
  for (const auto& [order, text] : ranks) groups += (groups.empty() ? "one on " : "; another on ") + text;
  const auto text =
      "Code that is not compiled has read weights in different orders: " + groups +
      ". Weights are all-gathered one after the other, so ranks were given other weights than they asked "
      "for, and the losses and gradients of the backward pass that ends here are wrong. Every rank must "
      "read the same modules in the same order: look for branches that depend on the data or on the rank.";
  if (context_.watchdog)
    context_.watchdog->refuse(text);
  TORCH_CHECK(false, text);
}

}  // namespace lightning_zero
