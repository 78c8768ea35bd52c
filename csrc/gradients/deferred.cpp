#include "gradients/deferred.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace lightning_zero {

bool DeferredGradients::has_any() const {
  Lock lock(context_.mutex);
  return may_be_pending_ && std::any_of(context_.records.begin(), context_.records.end(),
                                        [](const auto& record) { return record->deferred.filled; });
}

void DeferredGradients::defer(bool on, bool full) {
  Lock lock(context_.mutex);
  on_ = on && (full ? context_.size > 1 : context_.has_hosts());
  full_ = full;
  may_be_pending_ = may_be_pending_ || on_;
}

void DeferredGradients::reduce() {
  Lock lock(context_.mutex);
  at::NoGradGuard no_grad;
  validate();
  if (!may_be_pending_)
    return;
  const bool on = std::exchange(on_, false);
  launch_();
  on_ = may_be_pending_ = on;
  context_.count("deferred_reductions");
}

void DeferredGradients::finish_reduction() {
  if (on_)
    return;
  TORCH_CHECK_VALUE(!has_any(),
                    "lightning_zero: requires_grad was switched off for a parameter between micro-batches "
                    "whose gradients have not been reduced yet (stage=1, or cross_host_reduce='step'). "
                    "Change it between optimizer steps.");
  may_be_pending_ = false;
}

void DeferredGradients::validate() {
  if (!may_be_pending_)
    return;
  for (auto& record : context_.records) {
    auto& sum = record->deferred;
    if (!sum.filled || sum.version < 0)
      continue;
    const auto& grad = record->param.grad();
    if (!grad.defined()) {
      sum.clear();
      continue;
    }
    TORCH_CHECK_VALUE(grad.const_data_ptr() == record->grad.const_data_ptr() &&
                          static_cast<int64_t>(grad._version()) == sum.version,
                      "lightning_zero: the gradient of ", record->name,
                      " was changed between micro-batches whose gradients have not been reduced yet (",
                      sum.full ? "stage=1" : "cross_host_reduce='step'",
                      "), so the change would affect only a part of it. Change gradients after the last "
                      "micro-batch's backward, drop them with zero_grad(set_to_none=True), or pass ",
                      sum.full ? "stage=2" : "tuning=Tuning(cross_host_reduce='micro-batch')",
                      " to the strategy.");
  }
}

void DeferredGradients::abort() {
  for (auto& record : context_.records) {
    if (record->deferred.version < 0)
      record->deferred.clear();
  }
}

void DeferredGradients::track(ParamRecord& record) const {
  record.deferred.version = static_cast<int64_t>(record.param.grad()._version());
}

}  // namespace lightning_zero
