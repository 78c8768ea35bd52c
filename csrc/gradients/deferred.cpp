#include "gradients/deferred.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace lightning_zero {

bool DeferredGradients::any() const {
  Lock lock(context_.mutex);
  return context_.has_hosts() && std::any_of(context_.records.begin(), context_.records.end(),
                                             [](const auto& record) { return record->host_gradient.filled; });
}

void DeferredGradients::defer(bool on) {
  Lock lock(context_.mutex);
  on_ = on && context_.has_hosts();
}

void DeferredGradients::reduce() {
  Lock lock(context_.mutex);
  at::NoGradGuard no_grad;
  look();
  if (!any())
    return;
  const bool on = std::exchange(on_, false);
  launch_();
  on_ = on;
  context_.count("deferred_reductions");
}

void DeferredGradients::look() {
  if (!context_.has_hosts())
    return;
  for (auto& record : context_.records) {
    auto& kept = record->host_gradient;
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
        " was changed between micro-batches whose gradients the hosts have not reduced yet "
        "(reduce_across='step'), so the change would reach a part of it only. Change gradients "
        "after the last micro-batch's backward; drop them by zero_grad(set_to_none=True); or pass "
        "tuning=Tuning(reduce_across='micro-batch') to the strategy.");
  }
}

void DeferredGradients::abort() {
  for (auto& record : context_.records) {
    if (record->host_gradient.version < 0)
      record->host_gradient.empty();
  }
}

void DeferredGradients::stand_for(ParamRecord& record) const {
  record.host_gradient.version = static_cast<int64_t>(record.param.grad()._version());
}

}  // namespace lightning_zero
