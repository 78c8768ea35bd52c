#include "gradients/deferred.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace lightning_zero {

bool DeferredGradients::any() const {
  Lock lock(context_.mutex);
  return may_wait_ && std::any_of(context_.records.begin(), context_.records.end(),
                                  [](const auto& record) { return record->deferred.filled; });
}

void DeferredGradients::defer(bool on, bool whole) {
  Lock lock(context_.mutex);
  on_ = on && (whole ? context_.size > 1 : context_.has_hosts());
  whole_ = whole;
  may_wait_ = may_wait_ || on_;
}

void DeferredGradients::reduce() {
  Lock lock(context_.mutex);
  at::NoGradGuard no_grad;
  look();
  if (!may_wait_)
    return;
  const bool on = std::exchange(on_, false);
  launch_();
  on_ = may_wait_ = on;
  context_.count("deferred_reductions");
}

void DeferredGradients::are_reduced() {
  if (on_)
    return;
  TORCH_CHECK_VALUE(
      !any(),
      "lightning_zero: requires_grad was switched off for a parameter between micro-batches whose gradients "
      "have not been reduced yet (stage=1, or cross_host_reduce='step'). Change it between optimizer steps.");
  may_wait_ = false;
}

void DeferredGradients::look() {
  if (!may_wait_)
    return;
  for (auto& record : context_.records) {
    auto& kept = record->deferred;
    if (!kept.filled || kept.version < 0)
      continue;
    const auto& grad = record->param.grad();
    if (!grad.defined()) {
      kept.empty();
      continue;
    }
    TORCH_CHECK_VALUE(
        grad.const_data_ptr() == record->grad.const_data_ptr() &&
            static_cast<int64_t>(grad._version()) == kept.version,
        "lightning_zero: the gradient of ", record->name,
        " was changed between micro-batches whose gradients have not been reduced yet (",
        kept.whole ? "stage=1" : "cross_host_reduce='step'",
        "), so the change would reach a part of it only. Change gradients after the last micro-batch's "
        "backward; drop them by zero_grad(set_to_none=True); or pass ",
        kept.whole ? "stage=2" : "tuning=Tuning(cross_host_reduce='micro-batch')", " to the strategy.");
  }
}

void DeferredGradients::abort() {
  for (auto& record : context_.records) {
    if (record->deferred.version < 0)
      record->deferred.empty();
  }
}

void DeferredGradients::stand_for(ParamRecord& record) const {
  record.deferred.version = static_cast<int64_t>(record.param.grad()._version());
}

}  // namespace lightning_zero
