#include "bindings/facet.h"

namespace lightning_zero {

namespace {

Watchdog& watchdog(Watchdog& watchdog) {
  return watchdog;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lightning_zero, m) {
  // What methods take and return comes before the classes that have them.
  using Watched = c10::intrusive_ptr<Facet<Watchdog, Watchdog>>;
  Rows<Watchdog, Watchdog> dog(m, "Watchdog", watchdog);
  dog.by_hand()
      .def(torch::init(
          [](const std::string& group_name, double report_s, double timeout_s, std::vector<int64_t> hosts) {
            return c10::make_intrusive<Facet<Watchdog, Watchdog>>(
                c10::make_intrusive<Watchdog>(group_name, report_s, timeout_s, std::move(hosts)));
          }))
      .def("watch_replay",
           [](const Watched& self, const at::Tensor& ended, int64_t lane, int64_t number) {
             self->whole->activity().watch_replay(ended, static_cast<SequenceId>(lane), number);
           })
      .def("watch_device",
           [](const Watched& self, const at::Tensor& words) { self->whole->activity().watch_device(words); })
      .def("set_exchange_parts",
           [](const Watched& self, int64_t first, std::vector<std::string> weights) {
             self->whole->activity().set_exchange_parts(first, std::move(weights));
           })
      .def("sequence_number", [](const Watched& self, int64_t lane) {
        return self->whole->activity().status().sequence_number.at(static_cast<size_t>(lane));
      });
  dog("enter", &Watchdog::enter)               //
      ("busy", &Watchdog::busy)                //
      ("moved", &Watchdog::moved)              //
      ("begin_wait", &Watchdog::begin_wait)    //
      ("end_wait", &Watchdog::end_wait)        //
      ("on_abort", &Watchdog::on_abort)            //
      ("begin", &Watchdog::begin)              //
      ("fail", &Watchdog::fail)                //
      ("watch_group", &Watchdog::watch_group)  //
      ("set_report_interval", &Watchdog::set_report_interval)    //
      ("skip_grace_period", &Watchdog::skip_grace_period)              //
      ("check", &Watchdog::check)              //
      ("abort_reason", &Watchdog::abort_reason)          //
      ("leave", &Watchdog::leave)              //
      ("close", &Watchdog::close);

  bind_parts(m);

  Rows<Executor> executor(m, "Executor", itself);
  executor.by_hand()
      .def(torch::init([](std::string gathers, std::string gathers_across, std::string reduces,
                          std::string reduces_across, std::string control, const std::string& device) {
        return c10::make_intrusive<Facet<Executor>>(c10::make_intrusive<Executor>(
            Communicators::Names{std::move(gathers), std::move(gathers_across), std::move(reduces),
                                 std::move(reduces_across), std::move(control)},
            device));
      }))
      .def("parameters", facet<Parameters>())
      .def("weights", facet<Weights>())
      .def("gradients", facet<Reducer>())
      .def("graphs", facet<Recorder>())
      .def("transports", facet<Transports>())
      .def("configure",
           [](const Made& self, int64_t bucket_bytes, bool double_buffer, bool free_buckets,
              bool sync_collectives, bool poison, std::optional<at::ScalarType> reduce_dtype,
              int64_t exchange_part_bytes) {
             self->whole->configure({bucket_bytes, double_buffer, free_buckets, sync_collectives, poison,
                                     reduce_dtype, exchange_part_bytes});
           },
           "",
           {arg("bucket_bytes"), arg("double_buffer"), arg("free_buckets"), arg("sync_collectives"),
            arg("poison"), arg("reduce_dtype"), arg("exchange_part_bytes")})
      .def("watch", [](const Made& self, const Watched& watchdog) { self->whole->watch(watchdog->whole); })
      .def("on_backward_end",
           [](const Made& self, std::string op) { self->whole->gradients().on_abort(std::move(op)); })
      .def("keep_activations",
           [](const Made& self, std::string leave, std::string left, std::string come, std::string came) {
             self->whole->activations().keep(
                 {std::move(leave), std::move(left), std::move(come), std::move(came)});
           },
           "", {arg("leave"), arg("left"), arg("come"), arg("came")})
      .def("on_new_plan",
           [](const Made& self, std::string op) { self->whole->weights().on_new_plan(std::move(op)); })
      .def("before_user_writes",
           [](const Made& self, std::string op) {
             self->whole->weights().edits().before_change(std::move(op));
           })
      .def("counters", [](const Made& self) {
        c10::Dict<std::string, int64_t> result;
        for (const auto& [name, value] : self->whole->counters()) result.insert(name, value);
        return result;
      });
  executor("reset_counters", &Executor::reset_counters)  //
      ("begin_stage", &Executor::begin_stage)            //
      ("begin_training_step", &Executor::begin_training_step)            //
      ("size", &Executor::size)                          //
      ("rank", &Executor::rank)                          //
      ("close", &Executor::close);
}

}  // namespace lightning_zero
