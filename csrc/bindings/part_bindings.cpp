#include "bindings/binding_table.h"
#include "torch_compat.h"

namespace lightning_zero {

namespace {

Parameters& parameters(Executor& executor) {
  return executor.parameters();
}
Weights& weights(Executor& executor) {
  return executor.weights();
}
ShardAccess& shard_access(Executor& executor) {
  return executor.weights().access();
}
ComputeShards& compute_shards(Executor& executor) {
  return executor.weights().compute_shards();
}
UserWrites& user_writes(Executor& executor) {
  return executor.weights().user_writes();
}
UnshardedCache& unsharded_cache(Executor& executor) {
  return executor.weights().unsharded_cache();
}
Reducer& gradients(Executor& executor) {
  return executor.gradients();
}
AttachedGradients& attached(Executor& executor) {
  return executor.gradients().attached();
}
DeferredGradients& deferred(Executor& executor) {
  return executor.gradients().deferred();
}
RankConsensus& consensus(Executor& executor) {
  return executor.gradients().consensus();
}
GraphRecorder& graphs(Executor& executor) {
  return executor.graphs();
}
Transports& transports(Executor& executor) {
  return executor.transports();
}

}  // namespace

void bind_executor_parts(torch::Library& m) {
  BindingTable<Parameters>(m, "Parameters", parameters)  //
      ("add", &Parameters::add,
       {arg("name"), arg("param"), arg("shard"), arg("shape"), arg("order") = c10::IValue()})              //
      ("move", &Parameters::move, {arg("index"), arg("shard")})                                            //
      ("drop", &Parameters::drop, {arg("index")})                                                          //
      ("install_gradient_hooks", &Parameters::install_gradient_hooks, {arg("index")})                      //
      ("set_grad", &Parameters::set_grad, {arg("index"), arg("grad")})                                     //
      ("set_unsharded_cache", &Parameters::set_unsharded_cache, {arg("index"), arg("memory")})             //
      ("set_compute_shard", &Parameters::set_compute_shard, {arg("index"), arg("copy")})                   //
      ("set_fp8_factor", &Parameters::set_fp8_factor, {arg("index"), arg("factor")})                       //
      ("set_fp8_health", &Parameters::set_fp8_health, {arg("index"), arg("memory")})                       //
      ("set_fp8_shard", &Parameters::set_fp8_shard, {arg("index"), arg("copy"), arg("peers")})             //
      ("add_compute_shard_memory", &Parameters::add_compute_shard_memory, {arg("copies"), arg("shards")})  //
      ("mark_on_host", &Parameters::mark_on_host, {arg("index")})                                          //
      ("set_peer_compute_shards", &Parameters::set_peer_compute_shards, {arg("index"), arg("peers")})      //
      ("set_full_precision_shard", &Parameters::set_full_precision_shard,
       {arg("index"), arg("copy"), arg("peers")})  //
      ("set_deferred_gradient", &Parameters::set_deferred_gradient,
       {arg("index"), arg("memory"), arg("full")})  //
      ("set_peer_shards", &Parameters::set_peer_shards, {arg("index"), arg("shards")});

  BindingTable<Weights>(m, "Weights", weights)                                              //
      ("uses_epoch_lock", shard_access, &ShardAccess::uses_epoch_lock)                      //
      ("begin_writing", &Weights::begin_writing, {arg("stepping") = false})                 //
      ("end_writing", &Weights::end_writing)                                                //
      ("expire_compute_shards", &Weights::expire_compute_shards)                            //
      ("refresh_compute_shards", &Weights::refresh_compute_shards)                          //
      ("sync_compute_shards", &Weights::sync_compute_shards, {arg("ahead") = false})        //
      ("gathered_in", &Weights::gathered_in, {arg("dtype")})                                //
      ("reads_of_gradients", &Weights::reads_of_gradients)                                  //
      ("mark_fp8_shards_written", compute_shards, &ComputeShards::mark_fp8_shards_written)  //
      ("valid_compute_shards", compute_shards, &ComputeShards::valid_indices)               //
      ("mark_compute_shards_written", compute_shards, &ComputeShards::mark_compute_shards_written,
       {arg("indices"), arg("written")})                                                      //
      ("sync_user_writes", user_writes, &UserWrites::sync, {arg("forget") = false})           //
      ("drop", user_writes, &UserWrites::drop)                                                //
      ("serve_eager_from_cache", unsharded_cache, &UnshardedCache::serve_eager, {arg("on")})  //
      ("find_gathered", user_writes, &UserWrites::find_gathered, {arg("tensor")})             //
      ("shard_version", whole_executor, &Executor::shard_version)                             //
      ("user_write_count", compute_shards, &ComputeShards::user_write_count);

  BindingTable<Reducer>(m, "Gradients", gradients)                                              //
      ("last_attached", attached, &AttachedGradients::last_attached)                            //
      ("attachment_key", attached, &AttachedGradients::attachment_key)                          //
      ("has_gradients", attached, &AttachedGradients::has_gradients)                            //
      ("may_write_gradient", attached, &AttachedGradients::may_write_gradient, {arg("index")})  //
      ("is_full_backward", &compat::is_full_backward)                                           //
      ("completed_backwards", &Reducer::completed_backwards)                                    //
      ("mark", &Reducer::mark)                                                                  //
      ("segment", &Reducer::segment)                                                            //
      ("set_consensus_flag", consensus, &RankConsensus::set_flag, {arg("yes")})                 //
      ("take_consensus_flag", consensus, &RankConsensus::take_flag)                             //
      ("end_empty_backward", &Reducer::end_empty_backward)                                      //
      ("release_buffers", &Reducer::release_buffers)                                            //
      ("defer", deferred, &DeferredGradients::defer, {arg("on"), arg("full") = false})          //
      ("defers", deferred, &DeferredGradients::is_on)                                           //
      ("has_deferred", deferred, &DeferredGradients::has_any)                                   //
      ("reduce_deferred", deferred, &DeferredGradients::reduce)                                 //
      ("abort", whole_executor, &Executor::abort_backward);

  BindingTable<GraphRecorder>(m, "Graphs", graphs)                                             //
      ("disabled_reason", &GraphRecorder::disabled_reason, {arg("segment") = -1})              //
      ("no_collectives_reason", &GraphRecorder::no_collectives_reason)                         //
      ("begin", &GraphRecorder::begin, {arg("backward"), arg("adding"), arg("segment") = -1})  //
      ("end", &GraphRecorder::end)                                                             //
      ("abort", &GraphRecorder::abort)                                                         //
      ("fits", &GraphRecorder::fits, {arg("forward"), arg("backward")})                        //
      ("mark_not_run", &GraphRecorder::mark_not_run, {arg("number")})                          //
      ("drop", &GraphRecorder::drop, {arg("number")})                                          //
      ("before_replay", &GraphRecorder::before_replay, {arg("number")})                        //
      ("after_replay", &GraphRecorder::after_replay, {arg("number")});

  BindingTable<Transports>(m, "Transports", transports)  //
      ("staging_unit", &Transports::staging_unit)        //
      ("set_staging", whole_executor, &Executor::set_staging,
       {arg("staging"), arg("group_name"), arg("timeout_ms")})                             //
      ("set_barrier", &Transports::set_barrier, {arg("code"), arg("rows"), arg("words")})  //
      ("set_mean_kernels", &Transports::set_mean_kernels, {arg("code")})                   //
      ("limit_cross_host_bandwidth", &Transports::limit_cross_host_bandwidth,
       {arg("code"), arg("bytes_per_s")})                                              //
      ("mean_rows", &Transports::mean_rows, {arg("to"), arg("rows"), arg("add")})      //
      ("set_epoch_lock", whole_executor, &Executor::set_epoch_lock, {arg("numbers")})  //
      ("set_device_epoch_lock", whole_executor, &Executor::set_device_epoch_lock, {arg("code"), arg("rows")})(
          "set_remote_signals", &Transports::set_remote_signals, {arg("numbers")})(
          "set_device_remote_signals", &Transports::set_device_remote_signals, {arg("code"), arg("rows")});
}

}  // namespace lightning_zero
