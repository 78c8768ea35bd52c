#include "bindings/binding_table.h"

namespace lightning_zero {

namespace {

Watchdog& watchdog(Watchdog& watchdog) {
  return watchdog;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lightning_zero, m) {
  // Argument and result types must be registered before the classes whose methods use them.
  using WatchdogHandle = c10::intrusive_ptr<BoundPart<Watchdog, Watchdog>>;
  BindingTable<Watchdog, Watchdog> dog(m, "Watchdog", watchdog);
  dog.raw_class()
      .def(torch::init(
          [](const std::string& group_name, double report_s, double timeout_s, std::vector<int64_t> hosts) {
            return c10::make_intrusive<BoundPart<Watchdog, Watchdog>>(
                c10::make_intrusive<Watchdog>(group_name, report_s, timeout_s, std::move(hosts)));
          }))
      .def("watch_replay",
           [](const WatchdogHandle& self, const at::Tensor& ended, int64_t sequence, int64_t number) {
             self->root->activity().watch_replay(ended, static_cast<SequenceId>(sequence), number);
           })
      .def("watch_device", [](const WatchdogHandle& self,
                              const at::Tensor& words) { self->root->activity().watch_device(words); })
      .def("set_exchange_parts",
           [](const WatchdogHandle& self, int64_t first, std::vector<std::string> weights) {
             self->root->activity().set_exchange_parts(first, std::move(weights));
           })
      .def("sequence_number", [](const WatchdogHandle& self, int64_t sequence) {
        return self->root->activity().status().sequence_numbers.at(static_cast<size_t>(sequence));
      });
  dog("enter", &Watchdog::enter)                               //
      ("busy", &Watchdog::busy)                                //
      ("moved", &Watchdog::set_progress)                       //
      ("begin_wait", &Watchdog::begin_wait)                    //
      ("end_wait", &Watchdog::end_wait)                        //
      ("on_abort", &Watchdog::on_abort)                        //
      ("begin_stage", &Watchdog::begin_stage)                  //
      ("fail", &Watchdog::fail)                                //
      ("watch_group", &Watchdog::watch_group)                  //
      ("set_report_interval", &Watchdog::set_report_interval)  //
      ("skip_grace_period", &Watchdog::skip_grace_period)      //
      ("check", &Watchdog::check)                              //
      ("abort_reason", &Watchdog::abort_reason)                //
      ("limit_exit_time", &Watchdog::limit_exit_time)          //
      ("close", &Watchdog::close);

  bind_executor_parts(m);

  BindingTable<Executor> executor(m, "Executor", whole_executor);
  executor.raw_class()
      .def(torch::init([](std::string gathers, std::string inter_host_gathers, std::string reduces,
                          std::string inter_host_reduces, std::string control, const std::string& device) {
        return c10::make_intrusive<BoundPart<Executor>>(c10::make_intrusive<Executor>(
            Communicators::Names{std::move(gathers), std::move(inter_host_gathers), std::move(reduces),
                                 std::move(inter_host_reduces), std::move(control)},
            device));
      }))
      .def("parameters", bind_part<Parameters>())
      .def("weights", bind_part<Weights>())
      .def("gradients", bind_part<Reducer>())
      .def("graphs", bind_part<GraphRecorder>())
      .def("transports", bind_part<Transports>())
      .def("configure",
           [](const ExecutorHandle& self, int64_t bucket_bytes, bool double_buffer, bool free_buckets,
              bool sync_collectives, bool nan_fill, std::optional<at::ScalarType> reduce_dtype,
              int64_t exchange_part_bytes) {
             self->root->configure({bucket_bytes, double_buffer, free_buckets, sync_collectives, nan_fill,
                                    reduce_dtype, exchange_part_bytes});
           },
           "",
           {arg("bucket_bytes"), arg("double_buffer"), arg("free_buckets"), arg("sync_collectives"),
            arg("poison"), arg("reduce_dtype"), arg("exchange_part_bytes")})
      .def("watch", [](const ExecutorHandle& self,
                       const WatchdogHandle& watchdog) { self->root->watch(watchdog->root); })
      .def("on_backward_end", [](const ExecutorHandle& self,
                                 std::string op) { self->root->gradients().on_backward_end(std::move(op)); })
      .def("set_activation_ops",
           [](const ExecutorHandle& self, std::string start_offload, std::string wait_offload,
              std::string start_reload, std::string wait_reload) {
             self->root->activations().set_ops({std::move(start_offload), std::move(wait_offload),
                                                std::move(start_reload), std::move(wait_reload)});
           },
           "", {arg("start_offload"), arg("wait_offload"), arg("start_reload"), arg("wait_reload")})
      .def("on_new_plan", [](const ExecutorHandle& self,
                             std::string op) { self->root->weights().on_new_plan(std::move(op)); })
      .def("before_user_writes",
           [](const ExecutorHandle& self, std::string op) {
             self->root->weights().user_writes().set_before_write_op(std::move(op));
           })
      .def("counters", [](const ExecutorHandle& self) {
        c10::Dict<std::string, int64_t> result;
        for (const auto& [name, value] : self->root->counters()) result.insert(name, value);
        return result;
      });
  executor("reset_counters", &Executor::reset_counters)        //
      ("begin_stage", &Executor::begin_stage)                  //
      ("begin_training_step", &Executor::begin_training_step)  //
      ("size", &Executor::size)                                //
      ("rank", &Executor::rank)                                //
      ("close", &Executor::close);
}

}  // namespace lightning_zero
