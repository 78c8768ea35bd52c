// Gradients as users find them: which parameters have one, and where it lies.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"
#include "gradients/deferred.h"
#include "gradients/layout.h"

namespace lightning_zero {

class AttachedGradients {
 public:
  AttachedGradients(Context& context, const BucketLayout& layout) : context_(context), layout_(layout) {}

  // A backward has ended. `brought`: by parameter, whether it brought a gradient to some rank: then it gets
  // it. `deferred`: where that is deferred, what the parameter gets stands for it.
  void attach(const std::vector<char>& brought, const DeferredGradients& deferred);

  // Parameters with a gradient from the last backward.
  std::vector<int64_t> of_last_backward() const {
    Lock lock(context_.mutex);
    return attached_;
  }
  // Changes whenever a parameter's gradient comes, goes or lies elsewhere.
  int64_t key() const;
  // Whether the memory of this parameter's gradient is not a compute copy now.
  bool may_write_gradient(int64_t index) const;
  // Whether gradients are there, to which a backward that begins now would add.
  bool has_gradients() const;
  void close() { attached_.clear(); }

 private:
  Context& context_;
  const BucketLayout& layout_;
  std::vector<int64_t> attached_;
};

}  // namespace lightning_zero
