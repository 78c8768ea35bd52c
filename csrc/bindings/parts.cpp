#include "bindings/facet.h"
#include "runtime/compat.h"

namespace lightning_zero {

namespace {

Parameters& parameters(Executor& executor) {
  return executor.parameters();
}
Weights& weights(Executor& executor) {
  return executor.weights();
}
Access& access(Executor& executor) {
  return executor.weights().access();
}
ComputeCopies& copies(Executor& executor) {
  return executor.weights().copies();
}
Edits& edits(Executor& executor) {
  return executor.weights().edits();
}
ResidentWeights& resident(Executor& executor) {
  return executor.weights().resident();
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
Agreement& agreement(Executor& executor) {
  return executor.gradients().agreement();
}
Recorder& graphs(Executor& executor) {
  return executor.graphs();
}
Transports& transports(Executor& executor) {
  return executor.transports();
}

}  // namespace

void bind_parts(torch::Library& m) {
  Rows<Parameters>(m, "Parameters", parameters)  //
      ("add", &Parameters::add,
       {arg("name"), arg("param"), arg("shard"), arg("shape"), arg("order") = c10::IValue()})            //
      ("move", &Parameters::move, {arg("index"), arg("shard")})                                          //
      ("drop", &Parameters::drop, {arg("index")})                                                        //
      ("install_gradient_hooks", &Parameters::install_gradient_hooks, {arg("index")})                                    //
      ("set_grad", &Parameters::set_grad, {arg("index"), arg("grad")})                                   //
      ("set_resident", &Parameters::set_resident, {arg("index"), arg("memory")})                         //
      ("set_compute_shard", &Parameters::set_compute_shard, {arg("index"), arg("copy")})                   //
      ("add_compute_shard_memory", &Parameters::add_compute_shard_memory, {arg("copies"), arg("shards")})  //
      ("mark_on_host", &Parameters::mark_on_host, {arg("index")})                                          //
      ("set_peer_compute_shards", &Parameters::set_peer_compute_shards, {arg("index"), arg("peers")})                                //
      ("set_full_precision_shard", &Parameters::set_full_precision_shard,
       {arg("index"), arg("copy"), arg("peers")})  //
      ("set_deferred_gradient", &Parameters::set_deferred_gradient,
       {arg("index"), arg("memory"), arg("whole")})  //
      ("set_peer_shards", &Parameters::set_peer_shards, {arg("index"), arg("shards")});

  Rows<Weights>(m, "Weights", weights)                                                          //
      ("uses_epoch_lock", access, &Access::uses_epoch_lock)                                             //
      ("begin_writing", &Weights::begin_writing, {arg("stepping") = false})                     //
      ("end_writing", &Weights::end_writing)                                                    //
      ("expire_compute_shards", &Weights::expire_compute_shards)                                //
      ("refresh_compute_shards", &Weights::refresh_compute_shards)                              //
      ("sync_compute_shards", &Weights::sync_compute_shards, {arg("ahead") = false})                              //
      ("written", copies, &ComputeCopies::written)                                              //
      ("mark_compute_shards_written", copies, &ComputeCopies::mark_compute_shards_written, {arg("indices"), arg("written")})  //
      ("sync_user_writes", edits, &Edits::sync, {arg("forget") = false})                              //
      ("drop", edits, &Edits::drop)                                                             //
      ("serve_eager_from_resident", resident, &ResidentWeights::serve, {arg("on")})                        //
      ("find_gathered", edits, &Edits::find_gathered, {arg("tensor")})                          //
      ("epoch", itself, &Executor::epoch)                                                       //
      ("told", copies, &ComputeCopies::told);

  Rows<Reducer>(m, "Gradients", gradients)                                               //
      ("attached", attached, &AttachedGradients::of_last_backward)                       //
      ("key", attached, &AttachedGradients::key)                                         //
      ("has_gradients", attached, &AttachedGradients::has_gradients)                                 //
      ("may_write_gradient", attached, &AttachedGradients::may_write_gradient, {arg("index")})           //
      ("is_full_backward", &compat::is_full_backward)                                  //
      ("completed_backwards", &Reducer::completed_backwards)                                                 //
      ("mark", &Reducer::mark)                                                           //
      ("segment", &Reducer::segment)                                                     //
      ("set_consensus_flag", agreement, &Agreement::say, {arg("yes")})                     //
      ("take_consensus_flag", agreement, &Agreement::take_consensus_flag)                                      //
      ("end_empty_backward", &Reducer::end_empty_backward)                                   //
      ("release_buffers", &Reducer::release_buffers)                                     //
      ("defer", deferred, &DeferredGradients::defer, {arg("on"), arg("whole") = false})  //
      ("defers", deferred, &DeferredGradients::is_on)                                    //
      ("has_deferred", deferred, &DeferredGradients::any)                                //
      ("reduce_deferred", deferred, &DeferredGradients::reduce)                          //
      ("abort", itself, &Executor::abort_backward);

  Rows<Recorder>(m, "Graphs", graphs)                                                     //
      ("disabled_reason", &Recorder::disabled_reason, {arg("segment") = -1})                              //
      ("no_collectives_reason", &Recorder::no_collectives_reason)                               //
      ("begin", &Recorder::begin, {arg("backward"), arg("adding"), arg("segment") = -1})  //
      ("end", &Recorder::end)                                                             //
      ("abort", &Recorder::abort)                                                         //
      ("fits", &Recorder::fits, {arg("forward"), arg("backward")})                        //
      ("mark_not_run", &Recorder::mark_not_run, {arg("number")})                                //
      ("drop", &Recorder::drop, {arg("number")})                                          //
      ("before_replay", &Recorder::before_replay, {arg("number")})                        //
      ("after_replay", &Recorder::after_replay, {arg("number")});

  Rows<Transports>(m, "Transports", transports)    //
      ("staging_unit", &Transports::staging_unit)  //
      ("set_staging", itself, &Executor::set_staging,
       {arg("staging"), arg("group_name"), arg("timeout_ms")})                             //
      ("set_barrier", &Transports::set_barrier, {arg("code"), arg("rows"), arg("words")})  //
      ("set_mean_kernels", &Transports::set_mean_kernels, {arg("code")})                                 //
      ("limit_cross_host_bandwidth", &Transports::limit_cross_host_bandwidth, {arg("code"), arg("bytes_per_s")})       //
      ("mean_rows", &Transports::mean_rows, {arg("to"), arg("rows"), arg("add")})          //
      ("set_epoch_lock", itself, &Executor::set_epoch_lock, {arg("numbers")})                      //
      ("set_device_epoch_lock", itself, &Executor::set_device_epoch_lock, {arg("code"), arg("rows")})(
          "set_remote_signals", &Transports::set_remote_signals, {arg("numbers")})(
          "set_device_remote_signals", &Transports::set_device_remote_signals, {arg("code"), arg("rows")});
}

}  // namespace lightning_zero
