// The parameters that an executor knows, by their numbers, and the memory that belongs to each.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "context.h"

namespace lightning_zero {

class Reducer;
class Weights;

class Parameters {
 public:
  // `executor`: who is found by their shards.
  Parameters(Context& context, Executor& executor, Weights& weights, Reducer& gradients)
      : context_(context), executor_(executor), weights_(weights), gradients_(gradients) {}

  // Returns its number. `shape`: the whole parameter's; `order`: that of its dimensions in memory, by default
  // their own.
  int64_t add(std::string name, at::Tensor param, at::Tensor shard, std::vector<int64_t> shape,
              std::optional<std::vector<int64_t>> order);
  // Another piece of memory with the same values: shards move into an arena once all are known.
  void move(int64_t index, at::Tensor shard);
  // Nobody reads it any more: it was tied to another while the model was built.
  void drop(int64_t index);
  // Puts hooks of ours around the user's, see [Note: hooks on gradients]: backward raises if autograd brings
  // this shard a gradient. Again after the first of the user's hooks, which torch puts in place of all
  // others.
  void install_gradient_hooks(int64_t index);

  // Without memory: it is to lie elsewhere, and nothing holds that where it lay. Between steps.
  void set_grad(int64_t index, std::optional<at::Tensor> grad) {
    Lock lock(context_.mutex);
    auto& record = context_.at(index);
    if (record.compute_copy.holds != InCopy::WEIGHT)
      record.compute_copy.written = {};  // it is nobody's gradient any more, and no weight
    record.compute_copy.holds = InCopy::WEIGHT;
    record.compute_copy.last_read = {};
    record.grad = std::move(grad).value_or(at::Tensor());
    record.visible_grad = at::Tensor();
  }
  // See [Note: deferred gradients]. `whole`: for the whole gradient, and not for the host shard's.
  // Without memory: there is none any more, as of weights that stay.
  void set_deferred_gradient(int64_t index, std::optional<at::Tensor> memory, bool whole) {
    Lock lock(context_.mutex);
    auto& kept = context_.at(index).deferred;
    kept.memory = std::move(memory).value_or(at::Tensor());
    kept.whole = whole;
    kept.empty();
  }
  void set_resident(int64_t index, std::optional<at::Tensor> memory) {
    Lock lock(context_.mutex);
    context_.at(index).resident = {std::move(memory).value_or(at::Tensor())};
  }
  void set_compute_shard(int64_t index, at::Tensor copy) {
    Lock lock(context_.mutex);
    context_.at(index).compute_copy.own = std::move(copy);
  }
  // Its shard lies in the host's memory, which the device reads over its link.
  void mark_on_host(int64_t index) {
    Lock lock(context_.mutex);
    context_.at(index).compute_copy.by_steps = true;
  }
  // Compute copies in one tensor, of the shards in another: written in one kernel.
  void add_compute_shard_memory(at::Tensor copies, at::Tensor shards);
  // The parameter's compute copy on every rank, in memory that this process can read. See [Note: copies from
  // peers].
  void set_peer_compute_shards(int64_t index, std::vector<at::Tensor> peers);
  // The same for a copy in the parameter's own dtype.
  void set_full_precision_shard(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers);
  // The parameter's shard on every rank. Only where ranks take turns.
  void set_peer_shards(int64_t index, std::vector<at::Tensor> shards);

  // No shard is found any more.
  void unregister();

 private:
  // One of each rank of the host, each with at least `numel` elements: copies read them by address.
  bool is_of_whole_host(const std::vector<at::Tensor>& tensors, int64_t numel) const;

  Context& context_;
  Executor& executor_;
  Weights& weights_;
  Reducer& gradients_;
};

}  // namespace lightning_zero
