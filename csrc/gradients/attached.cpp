#include "gradients/attached.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "over_copies.h"

namespace lightning_zero {

void AttachedGradients::attach(const std::vector<char>& brought, const DeferredGradients& deferred) {
  attached_.clear();
  const bool defers = deferred.is_on();
  for (const auto index : layout_.order()) {
    if (!brought[index])
      continue;  // no rank used it: leave grad as it is, so that weight decay leaves it alone
    auto& record = context_.at(index);
    attached_.push_back(record.index);
    auto& held = record.param.mutable_grad();
    if (defers && !held.defined())
      record.grad.zero_();  // nothing has been reduced of it
    if (!held.defined() || held.const_data_ptr() != record.grad.const_data_ptr()) {
      auto& shown = record.visible_grad;
      if (!shown.defined() || shown.const_data_ptr() != record.grad.const_data_ptr()) {
        // No view to autograd: Dynamo fakes what a gradient is a view of as well, with symbols for its sizes,
        // and that is two thirds of the seconds in which it traces a model.
        at::AutoDispatchBelowADInplaceOrView no_views;
        shown = record.grad.view(record.param.sizes());
      }
      held = shown;
    }
    if (defers)
      deferred.stand_for(record);
  }
}

int64_t AttachedGradients::key() const {
  Lock lock(context_.mutex);
  uint64_t key = 14695981039346656037ULL;
  for (const auto& record : context_.records) {
    TORCH_CHECK_VALUE(!record->live || record->param.const_data_ptr() == record->shard.const_data_ptr(),
                      "lightning_zero: the data of parameter ", record->name,
                      " was replaced by another tensor, which neither gathers nor optimizer steps would see. "
                      "Copy into it instead (param.data.copy_(x)), or assign to module.weight.data.");
    over_copies::check_kept(*record);
    const auto& grad = record->param.grad();
    key =
        (key ^ (grad.defined() ? reinterpret_cast<uintptr_t>(grad.const_data_ptr()) : 0)) * 1099511628211ULL;
  }
  return static_cast<int64_t>(key);
}

bool AttachedGradients::may_write_gradient(int64_t index) const {
  Lock lock(context_.mutex);
  const auto& record = context_.at(index);
  return !record.grad_over_copy() || record.compute_copy.holds != InCopy::WEIGHT;
}

bool AttachedGradients::has_gradients() const {
  Lock lock(context_.mutex);
  return std::any_of(layout_.order().begin(), layout_.order().end(),
                     [&](int64_t i) { return context_.at(i).param.grad().defined(); });
}

}  // namespace lightning_zero
