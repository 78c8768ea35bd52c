// Gradients of several micro-batches that are reduced once.
//
// [Note: deferred gradients] While deferring is on, gradients of backwards are summed in float32 and not
// reduced completely. Either each rank sums full gradients and sends nothing. Or, with several hosts, each
// host reduces among its ranks and nothing crosses hosts. The next backward without deferring sends the sums.
// If an optimizer step comes first, reduce() sends them alone. Meanwhile param.grad exists and holds what has
// been reduced so far, possibly zeros. Its existence shows that a gradient counts, and zero_grad() drops it.
// Other changes of its values would not reach the deferred sum, so they raise an error.
//
// With full gradients a backward ends without communication. Ranks may differ in which parameters have
// gradients until these are reduced, when all ranks agree, as at the end of any backward.
#pragma once

#include <functional>
#include <utility>

#include "context.h"

namespace lightning_zero {

class DeferredGradients {
 public:
  // `launch`: reduces deferred gradients; collective.
  DeferredGradients(Context& context, std::function<void()> launch)
      : context_(context), launch_(std::move(launch)) {}

  // Switch deferring for the next backwards, on every rank. `full`: sum full gradients and reduce nothing;
  // otherwise reduce inside each host. No effect without other ranks or hosts.
  void defer(bool on, bool full);
  bool is_on() const {
    Lock lock(context_.mutex);
    return on_;
  }
  bool is_full() const { return on_ && full_; }
  // Return true if this rank has deferred gradients. Without `full`, the same on every rank.
  bool has_any() const;
  // Reduce deferred gradients now. Collective; legal outside backward; no effect without any.
  void reduce();
  // At the beginning of a backward or step: forget gradients that zero_grad() dropped, and raise if values
  // were changed.
  void validate();
  // End a backward that sent all deferred gradients.
  void finish_reduction();
  // Drop what an interrupted backward added and no param.grad represents.
  void abort();
  // Let the parameter's param.grad represent its deferred gradient.
  void track(ParamRecord& record) const;

 private:
  Context& context_;
  std::function<void()> launch_;
  bool on_ = false, full_ = false;
  bool may_be_pending_ = false;  // on some rank; the same on every rank
};

}  // namespace lightning_zero
