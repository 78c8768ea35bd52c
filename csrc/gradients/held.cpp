#include "gradients/held.h"

#include <algorithm>

#include "executor.h"
#include "runtime/compat.h"
#include "runtime/tensors.h"

namespace lightning_zero {

std::vector<HookedGradients::Sum>::iterator HookedGradients::find(int64_t index, int backward) {
  return std::find_if(sums_.begin(), sums_.end(), [&](const Sum& held) {
    return held.index == index && held.backward == backward;
  });
}

void HookedGradients::add(const ParamRecord& record, const at::Tensor& grad, int backward) {
  const auto& device = record.shard.device();
  auto found = find(record.index, backward);
  if (found == sums_.end()) {
    Sum held{backward, record.index, tensors::empty(record.numel, record.shard.options()), {}};
    held.flat.view(grad.sizes()).copy_(grad);
    sums_.push_back(std::move(held));
  } else {
    found->added.block(current_stream(device));
    found->flat.view(grad.sizes()).add_(grad);
    std::rotate(found, found + 1, sums_.end());
  }
  sums_.back().added.record(current_stream(device));
}

at::Tensor HookedGradients::take(const ParamRecord& record, int backward) {
  const auto found = find(record.index, backward);
  if (found == sums_.end())
    return {};
  const auto held = std::move(*found);
  sums_.erase(found);
  held.added.block(current_stream(record.shard.device()));
  return as_parameter(held.flat, record);
}

std::optional<int64_t> HookedGradients::next(int backward) const {
  const auto found =
      std::find_if(sums_.begin(), sums_.end(), [&](const Sum& held) { return held.backward == backward; });
  return found == sums_.end() ? std::nullopt : std::optional(found->index);
}

void wrap_user_hooks(const ParamRecord& record) {
  const auto* impl = record.param.unsafeGetTensorImpl();
  const auto first = [impl, name = record.name](const at::Tensor& grad) {
    const auto ref = ShardTable::instance().find(impl->data());
    TORCH_CHECK_VALUE(
        !ref || !grad.defined(), "lightning_zero: the training step computed with this rank's shard of ",
        name,
        ", as self.parameters() and self.named_parameters() return it, so each rank would get "
        "another result. Read whole weights "
        "from their modules (self.layer.weight), or use the optimizer's weight_decay for a "
        "penalty on all of them. If a function that you compiled (torch.compile) reads its weights or calls "
        "its module, leave torch.compile out there.");
    return ref && !grad.defined() ? ref->executor->gradients().take_hooked_sum(ref->index) : grad;
  };
  const auto last = [impl](const at::Tensor& grad) {
    const auto ref = ShardTable::instance().find(impl->data());
    if (!ref || !grad.defined())
      return grad;
    ref->executor->gradients().reduce_hooked(ref->index, grad);
    return at::Tensor();
  };
  compat::wrap_user_hooks(record.param, first, last);
}

}  // namespace lightning_zero
