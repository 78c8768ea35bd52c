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
      ("guard_gradient", &Parameters::guard_gradient, {arg("index")})                                    //
      ("set_grad", &Parameters::set_grad, {arg("index"), arg("grad")})                                   //
      ("set_resident", &Parameters::set_resident, {arg("index"), arg("memory")})                         //
      ("set_compute_copy", &Parameters::set_compute_copy, {arg("index"), arg("copy")})                   //
      ("add_compute_copy_memory", &Parameters::add_compute_copy_memory, {arg("copies"), arg("shards")})  //
      ("lie_on_host", &Parameters::lie_on_host, {arg("index")})                                          //
      ("set_peers", &Parameters::set_peers, {arg("index"), arg("peers")})                                //
      ("set_full_precision_copy", &Parameters::set_full_precision_copy,
       {arg("index"), arg("copy"), arg("peers")})  //
      ("set_deferred_gradient", &Parameters::set_deferred_gradient,
       {arg("index"), arg("memory"), arg("whole")})  //
      ("set_shards", &Parameters::set_shards, {arg("index"), arg("shards")});

  Rows<Weights>(m, "Weights", weights)                                                          //
      ("takes_turns", access, &Access::takes_turns)                                             //
      ("begin_writing", &Weights::begin_writing, {arg("stepping") = false})                     //
      ("end_writing", &Weights::end_writing)                                                    //
      ("expire_compute_copies", &Weights::expire_compute_copies)                                //
      ("refresh_compute_copies", &Weights::refresh_compute_copies)                              //
      ("sync_peers", &Weights::sync_peers, {arg("ahead") = false})                              //
      ("written", copies, &ComputeCopies::written)                                              //
      ("mark_written", copies, &ComputeCopies::mark_written, {arg("indices"), arg("written")})  //
      ("sync_edits", edits, &Edits::sync, {arg("forget") = false})                              //
      ("drop", edits, &Edits::drop)                                                             //
      ("serve_resident", resident, &ResidentWeights::serve, {arg("on")})                        //
      ("find_gathered", edits, &Edits::find_gathered, {arg("tensor")})                          //
      ("epoch", itself, &Executor::epoch)                                                       //
      ("told", copies, &ComputeCopies::told);

  Rows<Reducer>(m, "Gradients", gradients)                                               //
      ("attached", attached, &AttachedGradients::of_last_backward)                       //
      ("key", attached, &AttachedGradients::key)                                         //
      ("has_any", attached, &AttachedGradients::has_any)                                 //
      ("lies_there", attached, &AttachedGradients::lies_there, {arg("index")})           //
      ("is_whole_backward", &compat::is_whole_backward)                                  //
      ("backwards", &Reducer::backwards)                                                 //
      ("mark", &Reducer::mark)                                                           //
      ("segment", &Reducer::segment)                                                     //
      ("say_at_agreement", agreement, &Agreement::say, {arg("yes")})                     //
      ("was_said", agreement, &Agreement::was_said)                                      //
      ("end_without", &Reducer::end_without_gradients)                                   //
      ("release_buffers", &Reducer::release_buffers)                                     //
      ("defer", deferred, &DeferredGradients::defer, {arg("on"), arg("whole") = false})  //
      ("defers", deferred, &DeferredGradients::is_on)                                    //
      ("has_deferred", deferred, &DeferredGradients::any)                                //
      ("reduce_deferred", deferred, &DeferredGradients::reduce)                          //
      ("abort", itself, &Executor::abort_backward);

  Rows<Recorder>(m, "Graphs", graphs)                                                     //
      ("why_not", &Recorder::why_not, {arg("segment") = -1})                              //
      ("why_no_collectives", &Recorder::why_no_collectives)                               //
      ("begin", &Recorder::begin, {arg("backward"), arg("adding"), arg("segment") = -1})  //
      ("end", &Recorder::end)                                                             //
      ("abort", &Recorder::abort)                                                         //
      ("fits", &Recorder::fits, {arg("forward"), arg("backward")})                        //
      ("never_ran", &Recorder::never_ran, {arg("number")})                                //
      ("drop", &Recorder::drop, {arg("number")})                                          //
      ("before_replay", &Recorder::before_replay, {arg("number")})                        //
      ("after_replay", &Recorder::after_replay, {arg("number")});

  Rows<Transports>(m, "Transports", transports)    //
      ("staging_unit", &Transports::staging_unit)  //
      ("set_staging", itself, &Executor::set_staging,
       {arg("staging"), arg("group_name"), arg("timeout_ms")})                             //
      ("set_barrier", &Transports::set_barrier, {arg("code"), arg("rows"), arg("words")})  //
      ("use_means", &Transports::use_means, {arg("code")})                                 //
      ("limit_across", &Transports::limit_across, {arg("code"), arg("bytes_per_s")})       //
      ("mean_rows", &Transports::mean_rows, {arg("to"), arg("rows"), arg("add")})          //
      ("take_turns", itself, &Executor::take_turns, {arg("numbers")})                      //
      ("take_device_turns", itself, &Executor::take_device_turns, {arg("code"), arg("rows")})(
          "take_arrivals", &Transports::take_arrivals, {arg("numbers")})(
          "take_device_arrivals", &Transports::take_device_arrivals, {arg("code"), arg("rows")});
}

}  // namespace lightning_zero
