// The ops: what each is called, takes and returns, and what runs. Kernels only find the executor and call it.
// What torch must know besides, and the passes, says the same op's row in lightning_zero/native/ops.py.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "executor.h"

namespace {

using lightning_zero::Executor;
using lightning_zero::ShardTable;

// The executor of a list of shards; `others`: tensors that come with them, one for each.
Executor& executor_of(at::TensorList shards, const char* op, std::optional<size_t> others = std::nullopt) {
  TORCH_CHECK_VALUE(!shards.empty(), "lightning_zero::", op, " got no shards.");
  TORCH_CHECK_VALUE(!others || *others == shards.size(), "lightning_zero::", op, " got ", shards.size(),
                    " shards, but ", others.value_or(0), " tensors or numbers that belong to them.");
  return *ShardTable::instance().find(shards[0], op).executor;
}

// `resident`: memory in which passes may let the weight stay; not used here.
at::Tensor gather(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype,
                  const std::optional<at::Tensor>& resident) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather");
  return executor->weights().gather(index, shape, dtype, /*tracked=*/false);
}

// What code that is not compiled reads: the result is watched for edits and known to the saved-tensor hooks.
// Never for compiled code, which may use the result's memory for something else.
at::Tensor gather_eager(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather_eager");
  return executor->weights().gather(index, shape, dtype, /*tracked=*/true);
}

at::Tensor gather_start(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather_start");
  return executor->weights().gather_start(index, shape, dtype);
}

// Several weights in one launch and one tensor, each padded to ranks times its shard.
at::Tensor gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel) {
  return executor_of(shards, "gather_group").weights().gather_group(shards, dtype, numel);
}

void resident_start(at::TensorList resident, at::TensorList shards) {
  executor_of(shards, "resident_start", resident.size()).weights().resident_start(resident, shards);
}

void resident_wait(at::TensorList resident, at::TensorList shards) {
  executor_of(shards, "resident_wait").weights().resident().wait(shards);
}

void reduce_add(const at::Tensor& grad, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reduce");
  executor->gradients().reduce(index, grad);
}

// Several gradients at once: one call of the host for a block of the model.
void reduce_group(at::TensorList grads, at::TensorList shards) {
  auto& executor = executor_of(shards, "reduce_group", grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    executor.gradients().reduce(ShardTable::instance().find(shards[i], "reduce_group").index, grads[i]);
  }
}

// Gradients whose memory is left alone until reduce_release, where `borrow` is not 0.
void reduce_zero_copy(at::TensorList grads, at::TensorList shards, at::IntArrayRef borrow) {
  auto& executor = executor_of(shards, "reduce_zero_copy", grads.size());
  executor_of(shards, "reduce_zero_copy", borrow.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    executor.gradients().reduce(ShardTable::instance().find(shards[i], "reduce_zero_copy").index, grads[i],
                                borrow[i] != 0);
  }
}

void reduce_release(at::TensorList grads, at::TensorList shards) {
  auto& executor = executor_of(shards, "reduce_release");
  for (const auto& shard : shards)
    executor.gradients().release(ShardTable::instance().find(shard, "reduce_release").index);
}

void check_plan(const at::Tensor& shard, std::string_view digest, std::string_view plan) {
  auto [executor, index] = ShardTable::instance().find(shard, "check_plan");
  executor->weights().check_plan(std::string(digest), std::string(plan));
}

// Activations. Each op is found by any shard of its graph.
at::Tensor offload_start(const at::Tensor& value, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "offload_start");
  return executor->activations().leave(value);
}

void offload_wait(const at::Tensor& value, const at::Tensor& host, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "offload_wait");
  executor->activations().left(value, host);
}

at::Tensor reload_start(const at::Tensor& host, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reload_start");
  return executor->activations().come(host);
}

at::Tensor reload_wait(const at::Tensor& value, const at::Tensor& host, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reload_wait");
  executor->activations().came(value, host);
  return value;
}

// Both steps at once, until a pass comes that takes them apart.
at::Tensor offload(const at::Tensor& value, const at::Tensor& shard) {
  auto host = offload_start(value, shard);
  offload_wait(value, host, shard);
  return host;
}

at::Tensor reload(const at::Tensor& host, const at::Tensor& shard) {
  return reload_wait(reload_start(host, shard), host, shard);
}

// The form that autograd traces: it needs a gradient of the shard's shape. Ours is in the executor, so this
// one is zero, and a graph pass replaces the op by reduce_add. `number`: tells equal gradients of one weight
// apart, or the compiler would hand over only one of them.
at::Tensor reduce(const at::Tensor& grad, const at::Tensor& shard, int64_t number) {
  reduce_add(grad, shard);
  return at::zeros(shard.sizes(), shard.options());
}

// No key's in particular: a kernel is for any device, and autograd is not its affair.
template <class Kernel>
auto any(Kernel* kernel) {
  return torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel);
}

}  // namespace

TORCH_LIBRARY(lightning_zero, m) {
  m.def("gather(Tensor shard, int[] shape, ScalarType dtype, Tensor? resident=None) -> Tensor", any(gather));
  m.def("gather_eager(Tensor shard, int[] shape, ScalarType dtype) -> Tensor", any(gather_eager));
  m.def("gather_start(Tensor shard, int[] shape, ScalarType dtype) -> Tensor", any(gather_start));
  m.def("gather_group(Tensor[] shards, ScalarType dtype, int numel) -> Tensor", any(gather_group));
  // Both write: what reads a resident weight must come after them.
  m.def("resident_start(Tensor(a!)[] resident, Tensor[] shards) -> ()", any(resident_start));
  m.def("resident_wait(Tensor(a!)[] resident, Tensor[] shards) -> ()", any(resident_wait));
  m.def("reduce(Tensor grad, Tensor shard, int number=0) -> Tensor", any(reduce));
  m.def("reduce_add(Tensor grad, Tensor shard) -> ()", any(reduce_add));
  m.def("reduce_group(Tensor[] grads, Tensor[] shards) -> ()", any(reduce_group));
  m.def("reduce_zero_copy(Tensor[] grads, Tensor[] shards, int[] borrow) -> ()", any(reduce_zero_copy));
  m.def("reduce_release(Tensor[] grads, Tensor[] shards) -> ()", any(reduce_release));
  m.def("offload(Tensor value, Tensor shard) -> Tensor", any(offload));
  m.def("offload_start(Tensor value, Tensor shard) -> Tensor", any(offload_start));
  m.def("offload_wait(Tensor value, Tensor host, Tensor shard) -> ()", any(offload_wait));
  m.def("reload(Tensor host, Tensor shard) -> Tensor", any(reload));
  m.def("reload_start(Tensor host, Tensor shard) -> Tensor", any(reload_start));
  m.def("reload_wait(Tensor(a) value, Tensor host, Tensor shard) -> Tensor(a)", any(reload_wait));
  m.def("check_plan(Tensor shard, str digest, str plan) -> ()", any(check_plan));
}
