// Gradients as users find them: which parameters have one, and where it lies.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "context.h"
#include "gradients/layout.h"

namespace lightning_zero {

class AttachedGradients {
 public:
  AttachedGradients(Context& context, const BucketLayout& layout) : context_(context), layout_(layout) {}

  // A backward has ended, which brought gradients of these parameters to some rank: they get them.
  void attach(const std::set<int64_t>& brought);

  // Parameters with a gradient from the last backward.
  std::vector<int64_t> of_last_backward() const { return attached_; }
  // Changes whenever a parameter's gradient comes, goes or lies elsewhere.
  int64_t key() const;
  // Whether gradients are there, to which a backward that begins now would add.
  bool has_any() const;
  void close() { attached_.clear(); }

 private:
  Context& context_;
  const BucketLayout& layout_;
  std::vector<int64_t> attached_;
};

}  // namespace lightning_zero
