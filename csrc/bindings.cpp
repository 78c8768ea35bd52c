// What Python can ask, once: the classes' names, their methods' and their arguments'. Which types they have,
// and what they do, is said for Python in lightning_zero/native/facets.py, and a test compares both.
#include <torch/library.h>

#include "executor.h"
#include "runtime/compat.h"

namespace lightning_zero {

namespace {

using torch::arg;

// A part of an executor, as Python sees it. Keeps the executor.
template <class Owner>
struct Facet : torch::CustomClassHolder {
  explicit Facet(c10::intrusive_ptr<Executor> executor) : executor(std::move(executor)) {}
  c10::intrusive_ptr<Executor> executor;
};

// The executor's method of that name hands it out.
template <class Owner>
auto facet() {
  return [](const c10::intrusive_ptr<Executor>& self) { return c10::make_intrusive<Facet<Owner>>(self); };
}

// What a method takes and returns, whether it is const or not.
template <class Result, class... Args>
struct Signature {};
template <class Result, class Class, class... Args>
Signature<Result, Args...> signature(Result (Class::*)(Args...)) {
  return {};
}
template <class Result, class Class, class... Args>
Signature<Result, Args...> signature(Result (Class::*)(Args...) const) {
  return {};
}

template <class Owner>
class Rows {
 public:
  Rows(torch::Library& m, const char* name, Owner& (*owner)(Executor&))
      : class_(m.class_<Facet<Owner>>(name)), owner_(owner) {}

  // A method of the owner, or of `part`, which belongs to it.
  template <class Method>
    requires std::is_member_function_pointer_v<Method>
  Rows& operator()(const char* name, Method method, std::initializer_list<arg> names = {}) {
    return add(name, owner_, method, names);
  }
  template <class Part, class Method>
    requires std::is_member_function_pointer_v<Method>
  Rows& operator()(const char* name, Part& (*part)(Executor&), Method method,
                   std::initializer_list<arg> names = {}) {
    return add(name, part, method, names);
  }
  template <class Result>
  Rows& operator()(const char* name, Result (*function)()) {
    class_.def(name, [function](const Self&) { return function(); });
    return *this;
  }

 private:
  using Self = c10::intrusive_ptr<Facet<Owner>>;

  template <class Part, class Method>
  Rows& add(const char* name, Part& (*part)(Executor&), Method method, std::initializer_list<arg> names) {
    // torch reads types off a function that takes them by name.
    const auto define = [&]<class Result, class... Args>(Signature<Result, Args...>) {
      class_.def(
          name,
          [part, method](const Self& self, Args... args) -> Result {
            return (part(*self->executor).*method)(std::forward<Args>(args)...);
          },
          "", names);
    };
    define(signature(method));
    return *this;
  }

  torch::class_<Facet<Owner>> class_;
  Owner& (*owner_)(Executor&);
};

Executor& itself(Executor& executor) {
  return executor;
}
Parameters& parameters(Executor& executor) {
  return executor.parameters();
}
Weights& weights(Executor& executor) {
  return executor.weights();
}
Access& access(Executor& executor) {
  return executor.weights().access();
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

TORCH_LIBRARY_FRAGMENT(lightning_zero, m) {
  // What methods take and return comes before the classes that have them.
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
      .def("set_report", &Watchdog::set_report)
      .def("hurry", &Watchdog::hurry)
      .def("check", &Watchdog::check)
      .def("verdict", &Watchdog::verdict)
      .def("watch_replay",
           [](const c10::intrusive_ptr<Watchdog>& self, const at::Tensor& ended, int64_t lane,
              int64_t number) { self->activity().watch_replay(ended, static_cast<Lane>(lane), number); })
      .def("met", [](const c10::intrusive_ptr<Watchdog>& self,
                     int64_t lane) { return self->activity().status().met.at(static_cast<size_t>(lane)); })
      .def("leave", &Watchdog::leave)
      .def("close", &Watchdog::close);

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
      ("set_peers", &Parameters::set_peers, {arg("index"), arg("peers")})                                //
      ("set_full_precision_copy", &Parameters::set_full_precision_copy,
       {arg("index"), arg("copy"), arg("peers")})  //
      ("set_deferred_gradient", &Parameters::set_deferred_gradient,
       {arg("index"), arg("memory"), arg("whole")})  //
      ("set_shards", &Parameters::set_shards, {arg("index"), arg("shards")});

  Rows<Weights>(m, "Weights", weights)                                    //
      ("takes_turns", access, &Access::takes_turns)                       //
      ("begin_writing", &Weights::begin_writing)                          //
      ("end_writing", &Weights::end_writing)                              //
      ("expire_compute_copies", &Weights::expire_compute_copies)          //
      ("refresh_compute_copies", &Weights::refresh_compute_copies)        //
      ("sync_peers", &Weights::sync_peers, {arg("ahead") = false})        //
      ("sync_edits", edits, &Edits::sync, {arg("forget") = false})        //
      ("drop", edits, &Edits::drop)                                       //
      ("serve_resident", resident, &ResidentWeights::serve, {arg("on")})  //
      ("find_gathered", edits, &Edits::find_gathered, {arg("tensor")})    //
      ("epoch", itself, &Executor::epoch);

  Rows<Reducer>(m, "Gradients", gradients)                                               //
      ("attached", attached, &AttachedGradients::of_last_backward)                       //
      ("key", attached, &AttachedGradients::key)                                         //
      ("has_any", attached, &AttachedGradients::has_any)                                 //
      ("is_whole_backward", &compat::is_whole_backward)                                  //
      ("backwards", &Reducer::backwards)                                                 //
      ("mark", &Reducer::mark)                                                           //
      ("segment", &Reducer::segment)                                                     //
      ("say_at_agreement", agreement, &Agreement::say, {arg("yes")})                     //
      ("was_said", agreement, &Agreement::was_said)                                      //
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
       {arg("staging"), arg("group_name"), arg("timeout_ms")})                                 //
      ("set_barrier", &Transports::set_barrier, {arg("code"), arg("rows"), arg("words")})      //
      ("use_means", &Transports::use_means, {arg("code")})                                     //
      ("limit_across", &Transports::limit_across, {arg("code"), arg("bytes_per_s")})           //
      ("mean_rows", &Transports::mean_rows, {arg("to"), arg("rows"), arg("add")})              //
      ("take_turns", itself, &Executor::take_turns, {arg("numbers")})                          //
      ("take_device_turns", itself, &Executor::take_device_turns, {arg("code"), arg("rows")})  //
      ("take_arrivals", &Transports::take_arrivals, {arg("numbers")})                          //
      ("take_device_arrivals", &Transports::take_device_arrivals, {arg("code"), arg("rows")});

  m.class_<Executor>("Executor")
      .def(torch::init([](std::string gathers, std::string gathers_across, std::string reduces,
                          std::string reduces_across, std::string control, const std::string& device) {
        return c10::make_intrusive<Executor>(
            Communicators::Names{std::move(gathers), std::move(gathers_across), std::move(reduces),
                                 std::move(reduces_across), std::move(control)},
            device);
      }))
      .def("parameters", facet<Parameters>())
      .def("weights", facet<Weights>())
      .def("gradients", facet<Reducer>())
      .def("graphs", facet<Recorder>())
      .def("transports", facet<Transports>())
      .def("configure",
           [](const c10::intrusive_ptr<Executor>& self, int64_t bucket_bytes, bool double_buffer,
              bool free_buckets, bool sync_collectives, bool poison,
              std::optional<at::ScalarType> reduce_dtype, int64_t exchange_part_bytes) {
             self->configure({bucket_bytes, double_buffer, free_buckets, sync_collectives, poison,
                              reduce_dtype, exchange_part_bytes});
           },
           "",
           {arg("bucket_bytes"), arg("double_buffer"), arg("free_buckets"), arg("sync_collectives"),
            arg("poison"), arg("reduce_dtype"), arg("exchange_part_bytes")})
      .def("watch", &Executor::watch)
      .def("on_backward_end", [](const c10::intrusive_ptr<Executor>& self,
                                 std::string op) { self->gradients().on_end(std::move(op)); })
      .def("keep_activations",
           [](const c10::intrusive_ptr<Executor>& self, std::string leave, std::string left, std::string come,
              std::string came) {
             self->activations().keep({std::move(leave), std::move(left), std::move(come), std::move(came)});
           },
           "", {arg("leave"), arg("left"), arg("come"), arg("came")})
      .def("on_new_plan", [](const c10::intrusive_ptr<Executor>& self,
                             std::string op) { self->weights().on_new_plan(std::move(op)); })
      .def("counters",
           [](const c10::intrusive_ptr<Executor>& self) {
             c10::Dict<std::string, int64_t> result;
             for (const auto& [name, value] : self->counters()) result.insert(name, value);
             return result;
           })
      .def("reset_counters", &Executor::reset_counters)
      .def("begin_stage", &Executor::begin_stage)
      .def("begin_epoch", &Executor::begin_epoch)
      .def("size", &Executor::size)
      .def("rank", &Executor::rank)
      .def("close", &Executor::close);
}

}  // namespace lightning_zero
