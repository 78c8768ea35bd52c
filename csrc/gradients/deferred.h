// Gradients of several micro-batches that hosts reduce once.
//
// [Note: deferred gradients] While deferring is on, a backward's gradients are reduced among the ranks of
// each host, and added up there, in float32; nothing crosses hosts. The next backward without it takes them
// along; an optimizer's step that comes first has them reduced by themselves (reduce()).
// Meanwhile param.grad is there, and holds what has been reduced so far, which may be zeros: that a gradient
// counts, and that zero_grad() drops it, is known by whether param.grad is there. What is done to its values
// in between cannot be done to what hosts still keep, and is refused.
#pragma once

#include <functional>
#include <utility>

#include "context.h"

namespace lightning_zero {

class DeferredGradients {
 public:
  // `launch`: reduces what waits.
  DeferredGradients(Context& context, std::function<void()> launch)
      : context_(context), launch_(std::move(launch)) {}

  // For the backwards that begin from here on. Nothing happens where there is one host.
  void defer(bool on);
  bool is_on() const { return on_; }
  // Whether anything waits for other hosts, alike on every rank.
  bool any() const;
  // Reduces it now, on every rank, outside backward. Harmless where there is nothing.
  void reduce();
  // A backward, or a step, begins: forgets what zero_grad() has dropped, and throws where values were
  // changed.
  void look();
  // What a backward brought that was interrupted, and that is in no param.grad, does not count.
  void abort();
  // The parameter's param.grad stands for it from here on.
  void stand_for(ParamRecord& record) const;

 private:
  Context& context_;
  std::function<void()> launch_;
  bool on_ = false;
};

}  // namespace lightning_zero
