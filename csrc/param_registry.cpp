#include "param_registry.h"

#include <algorithm>
#include <utility>

#include "over_copies.h"

namespace lightning_zero {

const std::vector<at::Tensor>& ParamRecord::peer_shards_in(at::ScalarType dtype) const {
  static const std::vector<at::Tensor> none;
  if (shard.scalar_type() == dtype)
    return shards.empty() ? full_precision_shard.by_rank : shards;
  const auto& own = compute_shard.local;
  return own.defined() && own.scalar_type() == dtype ? compute_shard.by_rank : none;
}

ShardCopy* ParamRecord::resident_host_shard() {
  if (!resident.memory.defined())
    return nullptr;
  for (auto* copy : {&compute_shard, &full_precision_shard}) {
    if (copy->local.defined() && copy->local.const_data_ptr() == resident.memory.const_data_ptr())
      return copy;
  }
  return nullptr;
}

void DeferredGradient::add(const at::Tensor& grad) {
  auto sum = values(grad.numel()).view(grad.sizes());
  std::exchange(filled, true) ? sum.add_(grad) : sum.copy_(grad);
}

void ParamRecord::accept_user_gradient() {
  const auto& held = param.grad();
  if (!held.defined() || held.const_data_ptr() == grad.const_data_ptr())
    return;
  if (is_grad_aliased())
    grad_aliasing::raise_in_use(*this);
  grad.copy_(held.reshape({-1}));
}

ShardTable& ShardTable::instance() {
  static ShardTable table;
  return table;
}

void ShardTable::add(const at::Tensor& shard, ParamRef ref) {
  std::lock_guard<std::mutex> lock(mutex_);
  refs_.insert_or_assign(shard.const_data_ptr(), ref);
}

void ShardTable::remove(const at::Tensor& shard) {
  std::lock_guard<std::mutex> lock(mutex_);
  refs_.erase(shard.const_data_ptr());
}

std::optional<ParamRef> ShardTable::find(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = refs_.find(address);
  return it == refs_.end() ? std::nullopt : std::optional(it->second);
}

ParamRef ShardTable::find(const at::Tensor& shard, const char* op) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = refs_.find(shard.const_data_ptr());
  TORCH_CHECK_VALUE(
      it != refs_.end(), "lightning_zero::", op, " got a tensor of shape ", shard.sizes(), " and dtype ",
      shard.scalar_type(), " on ", shard.device(),
      " that is no shard of a live engine. A parameter was probably replaced after the model was sharded: by "
      "assigning module.weight = nn.Parameter(...), by module.to()/half()/cuda(), by copy.deepcopy(), or the "
      "engine was closed. Change the parameter's values in place, or inside "
      "lightning_zero.full_parameters(module).");
  return it->second;
}

at::Tensor as_parameter(const at::Tensor& flat, int64_t numel, at::IntArrayRef shape) {
  return flat.narrow(0, 0, numel).view(shape);
}

at::Tensor as_parameter(const at::Tensor& flat, const ParamRecord& record) {
  std::vector<int64_t> stored, inverse(record.order.size());
  for (size_t i = 0; i < record.order.size(); ++i) {
    stored.push_back(record.shape[record.order[i]]);
    inverse[record.order[i]] = static_cast<int64_t>(i);
  }
  auto full = as_parameter(flat, record.numel, stored);
  return std::is_sorted(inverse.begin(), inverse.end()) ? full : full.permute(inverse);
}

}  // namespace lightning_zero
