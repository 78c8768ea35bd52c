// The ops: schemas and kernels. A kernel only finds the executor and calls it. Shape functions, effects and
// costs, which torch and the passes need, are declared in lightning_zero/native/ops.py.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "executor.h"

namespace {

using lightning_zero::Executor;
using lightning_zero::ShardTable;

// Return the executor that owns `shards`. `others`: number of tensors that must match the shards one to one.
Executor& executor_of(at::TensorList shards, const char* op, std::optional<size_t> others = std::nullopt) {
  TORCH_CHECK_VALUE(!shards.empty(), "lightning_zero::", op, " got no shards.");
  TORCH_CHECK_VALUE(!others || *others == shards.size(), "lightning_zero::", op, " got ", shards.size(),
                    " shards, but ", others.value_or(0), " tensors or numbers that belong to them.");
  return *ShardTable::instance().find(shards[0], op).executor;
}

// `cache` is memory in which passes may keep the weight. The eager kernel ignores it.
at::Tensor gather(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype,
                  const std::optional<at::Tensor>& cache) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather");
  return executor->weights().gather(index, shape, dtype, /*tracked=*/false);
}

// Gather for eager code: the result is watched for user writes and known to the saved-tensor hooks. Compiled
// code must not use this op, since Inductor may reuse the result's memory.
at::Tensor gather_eager(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather_eager");
  return executor->weights().gather(index, shape, dtype, /*tracked=*/true);
}

at::Tensor gather_start(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather_start");
  return executor->weights().gather_start(index, shape, dtype);
}

// Return the weight in `dtype` as a view of the copy that this rank keeps, which must be the whole weight;
// newly gathered without a copy that may be read. The schema says that the result is a view of `shard`, so
// that Inductor neither reuses nor overwrites its memory.
at::Tensor weight_view(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "weight_view");
  return executor->weights().view(index, shape, dtype);
}

// Return the number by which the weight was divided before it was cast to fp8. A copy, since Inductor may
// reuse a result's memory.
at::Tensor weight_factor(const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "weight_factor");
  return executor->weights().fp8_factor(index);
}

// Return a copy of `scale`, and note numbers of the fp8 matrix `matrix` of this weight's layer, see
// lightning_zero/sharding/fp8_health.py. The result is read, so that graphs keep the op.
at::Tensor fp8_health(const at::Tensor& scale, const at::Tensor& amax,
                      const std::optional<at::Tensor>& underflow, const std::optional<at::Tensor>& overflow,
                      const at::Tensor& shard, int64_t matrix) {
  auto [executor, index] = ShardTable::instance().find(shard, "fp8_health");
  std::vector<at::Tensor> numbers{amax};
  for (const auto& number : {underflow, overflow})
    if (number)
      numbers.push_back(*number);
  executor->weights().note_fp8_health(index, matrix, numbers);
  return scale.clone();
}

// Gather several weights in one launch into one tensor, each padded to ranks * shard elements.
at::Tensor gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel) {
  return executor_of(shards, "gather_group").weights().gather_group(shards, dtype, numel);
}

void cached_gather_start(at::TensorList cache, at::TensorList shards) {
  executor_of(shards, "cached_gather_start", cache.size()).weights().cached_gather_start(cache, shards);
}

void cached_gather_wait(at::TensorList cache, at::TensorList shards) {
  executor_of(shards, "cached_gather_wait").weights().unsharded_cache().wait(shards);
}

void reduce_add(const at::Tensor& grad, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reduce");
  executor->gradients().reduce(index, grad);
}

// Reduce several gradients with one host call.
void reduce_group(at::TensorList grads, at::TensorList shards) {
  auto& executor = executor_of(shards, "reduce_group", grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    executor.gradients().reduce(ShardTable::instance().find(shards[i], "reduce_group").index, grads[i]);
  }
}

// Leave gradients with a nonzero `zero_copy` in place until reduce_release. `read`: as of reduce_after_reads.
void reduce_zero_copy(at::TensorList grads, at::TensorList shards, at::IntArrayRef zero_copy,
                      at::TensorList read) {
  auto& executor = executor_of(shards, "reduce_zero_copy", grads.size());
  executor_of(shards, "reduce_zero_copy", zero_copy.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    executor.gradients().reduce(ShardTable::instance().find(shards[i], "reduce_zero_copy").index, grads[i],
                                zero_copy[i] != 0);
  }
}

// Reduce gradients of weights some of which, `read`, the graph has from weight_view. The gradient may use
// that memory, and the schema says that the op writes to `read`: it runs after all readers.
void reduce_after_reads(at::TensorList grads, at::TensorList shards, at::TensorList read) {
  reduce_group(grads, shards);
}

// Make Inductor compute all that reads these results of weight_view before a gradient uses their memory.
void end_reads(at::TensorList read, at::TensorList shards) {}

void reduce_release(at::TensorList grads, at::TensorList shards) {
  auto& executor = executor_of(shards, "reduce_release");
  for (const auto& shard : shards)
    executor.gradients().release(ShardTable::instance().find(shard, "reduce_release").index);
}

void check_plan(const at::Tensor& shard, std::string_view digest, std::string_view plan) {
  auto [executor, index] = ShardTable::instance().find(shard, "check_plan");
  executor->weights().check_plan(std::string(digest), std::string(plan));
}

// Activations. The executor is found from any shard of the graph.
at::Tensor offload_start(const at::Tensor& value, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "offload_start");
  return executor->activations().start_offload(value);
}

void offload_wait(const at::Tensor& value, const at::Tensor& host, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "offload_wait");
  executor->activations().wait_offload(value, host);
}

at::Tensor reload_start(const at::Tensor& host, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reload_start");
  return executor->activations().start_reload(host);
}

at::Tensor reload_wait(const at::Tensor& value, const at::Tensor& host, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reload_wait");
  executor->activations().wait_reload(value, host);
  return value;
}

// Both steps at once, for graphs in which no pass has split the op.
at::Tensor offload(const at::Tensor& value, const at::Tensor& shard) {
  auto host = offload_start(value, shard);
  offload_wait(value, host, shard);
  return host;
}

at::Tensor reload(const at::Tensor& host, const at::Tensor& shard) {
  return reload_wait(reload_start(host, shard), host, shard);
}

// The op that autograd traces. It must return a gradient of the shard's shape, so it returns zeros, and a
// graph pass replaces it by reduce_add. `number` distinguishes equal gradients of one weight, which CSE would
// merge.
at::Tensor reduce(const at::Tensor& grad, const at::Tensor& shard, int64_t number) {
  reduce_add(grad, shard);
  return at::zeros(shard.sizes(), shard.options());
}

// Register a kernel for all devices and without autograd.
template <class Kernel>
auto any(Kernel* kernel) {
  return torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel);
}

}  // namespace

TORCH_LIBRARY(lightning_zero, m) {
  m.def("gather(Tensor shard, int[] shape, ScalarType dtype, Tensor? cache=None) -> Tensor", any(gather));
  m.def("gather_eager(Tensor shard, int[] shape, ScalarType dtype) -> Tensor", any(gather_eager));
  m.def("gather_start(Tensor shard, int[] shape, ScalarType dtype) -> Tensor", any(gather_start));
  m.def("gather_group(Tensor[] shards, ScalarType dtype, int numel) -> Tensor", any(gather_group));
  m.def("weight_view(Tensor(a) shard, int[] shape, ScalarType dtype) -> Tensor(a)", any(weight_view));
  m.def("weight_factor(Tensor shard) -> Tensor", any(weight_factor));
  m.def(
      "fp8_health(Tensor scale, Tensor amax, Tensor? underflow, Tensor? overflow, Tensor shard, int matrix) "
      "-> Tensor",
      any(fp8_health));
  // Both mutate `cache`, so that its readers are ordered after them.
  m.def("cached_gather_start(Tensor(a!)[] cache, Tensor[] shards) -> ()", any(cached_gather_start));
  m.def("cached_gather_wait(Tensor(a!)[] cache, Tensor[] shards) -> ()", any(cached_gather_wait));
  m.def("reduce(Tensor grad, Tensor shard, int number=0) -> Tensor", any(reduce));
  m.def("reduce_add(Tensor grad, Tensor shard) -> ()", any(reduce_add));
  m.def("reduce_group(Tensor[] grads, Tensor[] shards) -> ()", any(reduce_group));
  m.def("reduce_zero_copy(Tensor[] grads, Tensor[] shards, int[] zero_copy, Tensor(a!)[] read) -> ()",
        any(reduce_zero_copy));
  m.def("reduce_after_reads(Tensor[] grads, Tensor[] shards, Tensor(a!)[] read) -> ()",
        any(reduce_after_reads));
  m.def("end_reads(Tensor(a!)[] read, Tensor[] shards) -> ()", any(end_reads));
  m.def("reduce_release(Tensor[] grads, Tensor[] shards) -> ()", any(reduce_release));
  m.def("offload(Tensor value, Tensor shard) -> Tensor", any(offload));
  m.def("offload_start(Tensor value, Tensor shard) -> Tensor", any(offload_start));
  m.def("offload_wait(Tensor value, Tensor host, Tensor shard) -> ()", any(offload_wait));
  m.def("reload(Tensor host, Tensor shard) -> Tensor", any(reload));
  m.def("reload_start(Tensor host, Tensor shard) -> Tensor", any(reload_start));
  m.def("reload_wait(Tensor(a) value, Tensor host, Tensor shard) -> Tensor(a)", any(reload_wait));
  m.def("check_plan(Tensor shard, str digest, str plan) -> ()", any(check_plan));
}
