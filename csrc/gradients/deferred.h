// Gradients of several micro-batches that ranks, or hosts, reduce once.
//
// [Note: deferred gradients] While deferring is on, a backward's gradients are added up, in float32, and not
// reduced to the end: either whole, on each rank, and nothing is sent at all; or, where there are several
// hosts, after the ranks of each have reduced them among themselves, and nothing crosses hosts. The next
// backward without it takes them along; an optimizer's step that comes first has them reduced by themselves
// (reduce()). Meanwhile param.grad is there, and holds what has been reduced so far, which may be zeros: that
// a gradient counts, and that zero_grad() drops it, is known by whether param.grad is there. What is done to
// its values in between cannot be done to what still waits, and is refused.
//
// Where gradients stay whole, a backward ends without a word to other ranks: which parameters have one may
// differ between them until they are reduced, when all ranks agree on that, as at the end of any backward.
#pragma once

#include <functional>
#include <utility>

#include "context.h"

namespace lightning_zero {

class DeferredGradients {
 public:
  // `launch`: reduces what waits, on every rank.
  DeferredGradients(Context& context, std::function<void()> launch)
      : context_(context), launch_(std::move(launch)) {}

  // For the backwards that begin from here on, on every rank. `whole`: nothing is reduced, otherwise among
  // the ranks of each host. Nothing happens where nobody else is there to reduce with.
  void defer(bool on, bool whole);
  bool is_on() const {
    Lock lock(context_.mutex);
    return on_;
  }
  bool is_whole() const { return on_ && whole_; }
  // Whether anything waits on this rank; of what does not wait whole, alike on every rank.
  bool has_any() const;
  // Reduces it now, on every rank, outside backward. Harmless where there is nothing.
  void reduce();
  // A backward, or a step, begins: forgets what zero_grad() has dropped, and throws where values were
  // changed.
  void validate();
  // A backward has ended that took along what there was.
  void finish_reduction();
  // What a backward brought that was interrupted, and that is in no param.grad, does not count.
  void abort();
  // The parameter's param.grad stands for it from here on.
  void track(ParamRecord& record) const;

 private:
  Context& context_;
  std::function<void()> launch_;
  bool on_ = false, whole_ = false;
  bool may_be_pending_ = false;  // something, on some rank; alike on every rank
};

}  // namespace lightning_zero
