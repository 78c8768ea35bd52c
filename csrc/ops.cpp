// Schemas. Kernels only find the executor and call it; autograd and shape functions are registered in Python.
#include <torch/library.h>

#include "executor.h"

namespace {

using lightning_zero::Executor;
using lightning_zero::ShardTable;
using lightning_zero::Watchdog;

// `kept`: memory in which passes may keep the weight; not used here.
at::Tensor gather(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype,
                  const std::optional<at::Tensor>& kept) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather");
  return executor->gather(index, shape, dtype, /*tracked=*/false);
}

// What code that is not compiled reads: the result is watched for edits and known to the saved-tensor hooks.
// Never for compiled code, which may use the result's memory for something else.
at::Tensor gather_eager(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather_eager");
  return executor->gather(index, shape, dtype, /*tracked=*/true);
}

at::Tensor gather_start(const at::Tensor& shard, at::IntArrayRef shape, at::ScalarType dtype) {
  auto [executor, index] = ShardTable::instance().find(shard, "gather_start");
  return executor->gather_start(index, shape, dtype);
}

// Several weights in one launch and one tensor, each padded to ranks times its shard.
at::Tensor gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel) {
  auto [executor, index] = ShardTable::instance().find(shards[0], "gather_group");
  return executor->gather_group(shards, dtype, numel);
}

void keep_start(at::TensorList kept, at::TensorList shards) {
  auto [executor, index] = ShardTable::instance().find(shards[0], "keep_start");
  executor->keep_start(kept, shards);
}

void keep_wait(at::TensorList kept, at::TensorList shards) {
  auto [executor, index] = ShardTable::instance().find(shards[0], "keep_wait");
  executor->keep_wait(shards);
}

void reduce_add(const at::Tensor& grad, const at::Tensor& shard) {
  auto [executor, index] = ShardTable::instance().find(shard, "reduce");
  executor->reduce(index, grad);
}

// Several gradients at once: one call of the host for a block of the model.
void reduce_group(at::TensorList grads, at::TensorList shards) {
  auto [executor, first] = ShardTable::instance().find(shards[0], "reduce_group");
  for (size_t i = 0; i < grads.size(); ++i) {
    executor->reduce(ShardTable::instance().find(shards[i], "reduce_group").index, grads[i]);
  }
}

// Gradients whose memory is left alone until reduce_release, where `hold` is not 0.
void reduce_hold(at::TensorList grads, at::TensorList shards, at::IntArrayRef hold) {
  auto [executor, first] = ShardTable::instance().find(shards[0], "reduce_hold");
  for (size_t i = 0; i < grads.size(); ++i) {
    executor->reduce(ShardTable::instance().find(shards[i], "reduce_hold").index, grads[i], hold[i] != 0);
  }
}

void reduce_release(at::TensorList grads, at::TensorList shards) {
  auto [executor, first] = ShardTable::instance().find(shards[0], "reduce_release");
  for (const auto& shard : shards)
    executor->release(ShardTable::instance().find(shard, "reduce_release").index);
}

void enter(const at::Tensor& shard, std::string_view digest, std::string_view plan) {
  auto [executor, index] = ShardTable::instance().find(shard, "enter");
  executor->enter(std::string(digest), std::string(plan));
}

// The form that autograd traces: it needs a gradient of the shard's shape. Ours is in the executor, so this
// one is zero, and a graph pass replaces the op by reduce_add. `number`: tells equal gradients of one weight
// apart, or the compiler would hand over only one of them.
at::Tensor reduce(const at::Tensor& grad, const at::Tensor& shard, int64_t number) {
  reduce_add(grad, shard);
  return at::zeros(shard.sizes(), shard.options());
}

}  // namespace

TORCH_LIBRARY(lightning_zero, m) {
  m.class_<Watchdog>("Watchdog")
      .def(torch::init<const std::string&, double, double>())
      .def("enter", &Watchdog::enter)
      .def("busy", &Watchdog::busy)
      .def("begin_wait", &Watchdog::begin_wait)
      .def("end_wait", &Watchdog::end_wait)
      .def("on_end", &Watchdog::on_end)
      .def("begin", &Watchdog::begin)
      .def("fail", &Watchdog::fail)
      .def("watch_group", &Watchdog::watch_group)
      .def("hurry", &Watchdog::hurry)
      .def("check", &Watchdog::check)
      .def("verdict", &Watchdog::verdict)
      .def("leave", &Watchdog::leave)
      .def("close", &Watchdog::close);
  m.class_<Executor>("Executor")
      .def(torch::init<const std::string&, const std::string&, const std::string&, const std::string&>())
      .def("configure",
           [](const c10::intrusive_ptr<Executor>& self, int64_t bucket_bytes, bool double_buffer,
              bool predivide, bool free_buckets, bool sync_collectives, bool poison,
              std::optional<at::ScalarType> reduce_dtype) {
             self->configure({bucket_bytes, double_buffer, predivide, free_buckets, sync_collectives, poison,
                              reduce_dtype});
           })
      .def("watch", &Executor::watch)
      .def("on_backward_end", &Executor::on_backward_end)
      .def("on_new_plan", &Executor::on_new_plan)
      .def("add_parameter", &Executor::add_parameter)
      .def("move_parameter", &Executor::move_parameter)
      .def("drop_parameter", &Executor::drop_parameter)
      .def("guard_gradient", &Executor::guard_gradient)
      .def("set_grad", &Executor::set_grad)
      .def("set_kept", &Executor::set_kept)
      .def("set_staging", &Executor::set_staging)
      .def("set_barrier", &Executor::set_barrier)
      .def("begin_stage", &Executor::begin_stage)
      .def("begin_epoch", &Executor::begin_epoch)
      .def("use_means", &Executor::use_means)
      .def("mean_rows", &Executor::mean_rows)
      .def("set_shadow", &Executor::set_shadow)
      .def("add_shadow_memory", &Executor::add_shadow_memory)
      .def("set_peers", &Executor::set_peers)
      .def("set_exact", &Executor::set_exact)
      .def("take_turns", &Executor::take_turns)
      .def("take_device_turns", &Executor::take_device_turns)
      .def("set_shards", &Executor::set_shards)
      .def("takes_turns", &Executor::takes_turns)
      .def("begin_writing", &Executor::begin_writing)
      .def("end_writing", &Executor::end_writing)
      .def("expire_shadows", &Executor::expire_shadows)
      .def("write_shadows", &Executor::write_shadows)
      .def("close", &Executor::close)
      .def("sync_edits", &Executor::sync_edits)
      .def("drop_weights", &Executor::drop_weights)
      .def("find_gathered", &Executor::find_gathered)
      .def("why_not_recorded", &Executor::why_not_recorded)
      .def("record_graph", &Executor::record_graph)
      .def("end_recording", &Executor::end_recording)
      .def("abort_recording", &Executor::abort_recording)
      .def("fits", &Executor::fits)
      .def("never_ran", &Executor::never_ran)
      .def("drop_graph", &Executor::drop_graph)
      .def("meet_peers", &Executor::meet_peers)
      .def("backwards", &Executor::backwards)
      .def("say_at_agreement", &Executor::say_at_agreement)
      .def("was_said", &Executor::was_said)
      .def("before_replay", &Executor::before_replay)
      .def("after_replay", &Executor::after_replay)
      .def("has_gradients", &Executor::has_gradients)
      .def("is_whole_backward", &Executor::is_whole_backward)
      .def("epoch", &Executor::epoch)
      .def("abort_backward", &Executor::abort_backward)
      .def("release_buffers", &Executor::release_buffers)
      .def("attached", &Executor::attached)
      .def("gradients_key", &Executor::gradients_key)
      .def("counters",
           [](const c10::intrusive_ptr<Executor>& self) {
             c10::Dict<std::string, int64_t> result;
             for (const auto& [name, value] : self->counters()) result.insert(name, value);
             return result;
           })
      .def("reset_counters", &Executor::reset_counters)
      .def("size", &Executor::size)
      .def("rank", &Executor::rank);

  m.def("gather(Tensor shard, int[] shape, ScalarType dtype, Tensor? kept=None) -> Tensor");
  m.def("gather_eager(Tensor shard, int[] shape, ScalarType dtype) -> Tensor");
  m.def("gather_start(Tensor shard, int[] shape, ScalarType dtype) -> Tensor");
  m.def("gather_group(Tensor[] shards, ScalarType dtype, int numel) -> Tensor");
  // Both write: what reads a kept weight must come after them.
  m.def("keep_start(Tensor(a!)[] kept, Tensor[] shards) -> ()");
  m.def("keep_wait(Tensor(a!)[] kept, Tensor[] shards) -> ()");
  m.def("reduce(Tensor grad, Tensor shard, int number=0) -> Tensor");
  m.def("reduce_add(Tensor grad, Tensor shard) -> ()");
  m.def("reduce_group(Tensor[] grads, Tensor[] shards) -> ()");
  m.def("reduce_hold(Tensor[] grads, Tensor[] shards, int[] hold) -> ()");
  m.def("reduce_release(Tensor[] grads, Tensor[] shards) -> ()");
  m.def("enter(Tensor shard, str digest, str plan) -> ()");
}

TORCH_LIBRARY_IMPL(lightning_zero, CompositeExplicitAutograd, m) {
  m.impl("gather", gather);
  m.impl("gather_eager", gather_eager);
  m.impl("gather_start", gather_start);
  m.impl("gather_group", gather_group);
  m.impl("keep_start", keep_start);
  m.impl("keep_wait", keep_wait);
  m.impl("reduce", reduce);
  m.impl("reduce_add", reduce_add);
  m.impl("reduce_group", reduce_group);
  m.impl("reduce_hold", reduce_hold);
  m.impl("reduce_release", reduce_release);
  m.impl("enter", enter);
}
