#include "parameters.h"

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>

#include "gradients/held.h"
#include "gradients/reducer.h"
#include "weights/weights.h"

namespace lightning_zero {

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
  weights_.edits().sync(/*forget=*/true);
  ShardTable::instance().remove(record.shard);
  weights_.access().take_back();
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
  surround_hooks(context_.at(index));
}

bool Parameters::is_of_whole_host(const std::vector<at::Tensor>& tensors, int64_t numel) const {
  return static_cast<int64_t>(tensors.size()) == context_.inside.size &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
           return tensor.is_contiguous() && tensor.numel() >= numel &&
                  tensor.scalar_type() == tensors[0].scalar_type();
         });
}

void Parameters::add_compute_shard_memory(at::Tensor copies, at::Tensor shards) {
  Lock lock(context_.mutex);
  weights_.copies().add_memory(std::move(copies), std::move(shards));
}

void Parameters::set_peer_compute_shards(int64_t index, std::vector<at::Tensor> peers) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(is_of_whole_host(peers, record.host_shard_numel()), record.name);
  record.compute_copy.of_ranks = std::move(peers);
  weights_.access().share();
  weights_.access().take_back();
}

void Parameters::set_full_precision_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT((is_of_whole_host(peers, record.host_shard_numel()) ||
                         (context_.exchanges_weights() && peers.empty())) &&
                        copy.scalar_type() == record.shard.scalar_type());
  record.full_precision_copy.own = std::move(copy);
  record.full_precision_copy.of_ranks = std::move(peers);
  weights_.access().take_back();
}

void Parameters::set_peer_shards(int64_t index, std::vector<at::Tensor> shards) {
  Lock lock(context_.mutex);
  auto& record = context_.at(index);
  TORCH_INTERNAL_ASSERT(weights_.access().uses_epoch_lock() && is_of_whole_host(shards, record.shard_numel()),
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
