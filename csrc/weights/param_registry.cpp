#include "weights/param_registry.h"

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "context.h"
#include "gradients/grad_aliasing.h"
#include "gradients/reducer.h"
#include "weights/weights.h"

namespace lightning_zero {

namespace {

constexpr double kLargestFp8 = 448;  // of float8_e4m3fn

}  // namespace

const std::vector<at::Tensor>& ParamRecord::peer_shards_in(at::ScalarType dtype) const {
  static const std::vector<at::Tensor> none;
  if (shard.scalar_type() == dtype)
    return shards.empty() ? full_precision_shard.by_rank : shards;
  if (dtype == at::kFloat8_e4m3fn)
    return fp8_shard.by_rank;
  const auto& own = compute_shard.local;
  return own.defined() && own.scalar_type() == dtype ? compute_shard.by_rank : none;
}

at::Tensor ParamRecord::cast(const at::Tensor& values, at::ScalarType dtype) const {
  if (dtype != at::kFloat8_e4m3fn)
    return values.to(dtype);
  TORCH_INTERNAL_ASSERT(fp8_factor.defined(), name, " has no factor for fp8");
  // A weight that has grown since its factor was computed would become NaN.
  return values.mul(fp8_factor.reciprocal()).clamp_(-kLargestFp8, kLargestFp8).to(dtype);
}

ShardCopy* ParamRecord::cached_host_shard() {
  if (!cached.memory.defined())
    return nullptr;
  for (auto* copy : {&compute_shard, &full_precision_shard}) {
    if (copy->local.defined() && copy->local.const_data_ptr() == cached.memory.const_data_ptr())
      return copy;
  }
  return nullptr;
}

void DeferredGradient::add(const at::Tensor& grad) {
  auto sum = values(grad.numel()).view(grad.sizes());
  std::exchange(filled, true) ? sum.add_(grad) : sum.copy_(grad);
}

void ParamRecord::accept_user_gradient() {
  const auto& attached = param.grad();
  if (!attached.defined() || attached.const_data_ptr() == grad.const_data_ptr())
    return;
  if (is_grad_aliased())
    grad_aliasing::raise_in_use(*this);
  grad.copy_(attached.reshape({-1}));
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
  TORCH_CHECK_VALUE(it != refs_.end(), "lightning_zero::", op, " got a tensor of shape ", shard.sizes(),
                    " and dtype ", shard.scalar_type(), " on ", shard.device(),
                    " that is no shard of a live engine. A parameter was probably replaced after the model "
                    "was sharded: by assigning module.weight = nn.Parameter(...), by "
                    "module.to()/half()/cuda(), by copy.deepcopy(), or the engine was closed. Change the "
                    "parameter's values in place, or inside lightning_zero.full_parameters(module).");
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

int64_t Parameters::add(std::string name, at::Tensor param, at::Tensor shard, std::vector<int64_t> shape,
                        std::optional<std::vector<int64_t>> order) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(shard.dim() == 1 && shard.is_contiguous() && shard.numel() > 0 &&
                        shard.device() == context_.device);
  const auto numel = c10::multiply_integers(shape);
  TORCH_INTERNAL_ASSERT(numel <= context_.shards() * shard.numel());
  if (!order) {
    order.emplace(shape.size());
    std::iota(order->begin(), order->end(), 0);
  }
  auto record = std::make_unique<ParamRecord>();
  record->index = static_cast<int64_t>(context_.records.size());
  record->name = std::move(name);
  record->param = std::move(param);
  record->shard = std::move(shard);
  record->numel = numel;
  record->deferred.shards = context_.shards_of_host_shard();
  record->shape = std::move(shape);
  record->order = std::move(*order);
  ShardTable::instance().add(record->shard, ParamRef{&executor_, record->index});
  context_.records.push_back(std::move(record));
  gradients_.layout().add_parameter();
  return context_.records.back()->index;
}

void Parameters::move(int64_t index, at::Tensor shard) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(shard.dim() == 1 && shard.is_contiguous() && shard.numel() == record.shard_numel());
  weights_.user_writes().sync(/*forget=*/true);
  ShardTable::instance().remove(record.shard);
  weights_.access().invalidate();
  record.shards.clear();
  record.shard = std::move(shard);
  ShardTable::instance().add(record.shard, ParamRef{&executor_, index});
}

void Parameters::drop(int64_t index) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  ShardTable::instance().remove(record.shard);
  record.live = false;
  gradients_.layout().forget();
}

void Parameters::install_gradient_hooks(int64_t index) {
  Lock lock(context_.mutex);
  wrap_user_hooks(context_.at(index));
}

void Parameters::set_grad(int64_t index, std::optional<at::Tensor> grad) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  if (record.compute_shard.state != ComputeShardState::WEIGHT)
    record.compute_shard.written = {};  // it is neither a gradient nor a weight
  record.compute_shard.state = ComputeShardState::WEIGHT;
  record.compute_shard.last_read = {};
  record.grad = std::move(grad).value_or(at::Tensor());
  record.visible_grad = at::Tensor();
}

void Parameters::set_deferred_gradient(int64_t index, std::optional<at::Tensor> memory, bool full) {
  Lock lock(context_.mutex);
  auto& sum = context_.at(index).deferred;
  sum.memory = std::move(memory).value_or(at::Tensor());
  sum.full = full;
  sum.clear();
}

void Parameters::set_unsharded_cache(int64_t index, std::optional<at::Tensor> memory) {
  Lock lock(context_.mutex);
  context_.at(index).cached = {std::move(memory).value_or(at::Tensor())};
}

void Parameters::set_compute_shard(int64_t index, at::Tensor copy) {
  Lock lock(context_.mutex);
  context_.at(index).compute_shard.local = std::move(copy);
}

void Parameters::set_fp8_factor(int64_t index, at::Tensor factor) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(factor.numel() == 1 && factor.scalar_type() == at::kFloat);
  context_.at(index).fp8_factor = std::move(factor);
}

void Parameters::set_fp8_health(int64_t index, at::Tensor memory) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(memory.dim() == 2 && memory.scalar_type() == at::kFloat);
  context_.at(index).fp8_health = std::move(memory);
}

void Parameters::set_fp8_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(copy.numel() == record.shard_numel() && copy.scalar_type() == at::kFloat8_e4m3fn);
  TORCH_INTERNAL_ASSERT(peers.empty() ||
                        (weights_.access().uses_epoch_lock() && covers_host(peers, copy.numel())));
  record.fp8_shard.by_rank = std::move(peers);
  record.fp8_shard.local = std::move(copy);
  record.fp8_shard.written = {};
}

void Parameters::mark_on_host(int64_t index) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  record.on_host = record.compute_shard.written_by_optimizer = true;
}

bool Parameters::covers_host(const std::vector<at::Tensor>& tensors, int64_t numel) const {
  return static_cast<int64_t>(tensors.size()) == context_.intra_host.size &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
           return tensor.is_contiguous() && tensor.numel() >= numel &&
                  tensor.scalar_type() == tensors[0].scalar_type();
         });
}

void Parameters::add_compute_shard_memory(at::Tensor copies, at::Tensor shards) {
  Lock lock(context_.mutex);
  weights_.compute_shards().add_memory(std::move(copies), std::move(shards));
}

void Parameters::set_peer_compute_shards(int64_t index, std::vector<at::Tensor> peers) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(covers_host(peers, record.host_shard_numel()), record.name);
  record.compute_shard.by_rank = std::move(peers);
  weights_.access().set_shared();
  weights_.access().invalidate();
}

void Parameters::set_full_precision_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(
      (covers_host(peers, record.host_shard_numel()) || (context_.exchanges_weights() && peers.empty())) &&
      copy.scalar_type() == record.shard.scalar_type());
  record.full_precision_shard.local = std::move(copy);
  record.full_precision_shard.by_rank = std::move(peers);
  weights_.access().invalidate();
}

void Parameters::set_peer_shards(int64_t index, std::vector<at::Tensor> shards) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(weights_.access().uses_epoch_lock() && covers_host(shards, record.shard_numel()),
                        record.name);
  record.shards = std::move(shards);
}

void Parameters::unregister() {
  for (const auto& record : context_.records) {
    if (record->live)
      ShardTable::instance().remove(record->shard);
  }
}

}  // namespace lightning_zero
