#include "transport/communicators.h"

namespace lightning_zero {

Communicators::Communicators(Context& context, const std::string& gather_group,
                             const std::string& reduce_group, const std::string& control_group)
    : gathers_(gather_group, context.device, Lane::GATHER),
      reduces_(reduce_group, context.device, Lane::REDUCE) {
  context.rank = gathers_.rank();
  context.size = gathers_.size();
  if (context.size > 1)
    control_.emplace(control_group, c10::Device(c10::kCPU), Lane::CONTROL);
}

void Communicators::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  gathers_.watch(watchdog);
  reduces_.watch(watchdog);
  if (control_)
    control_->watch(watchdog);
}

void Communicators::configure(const ExecutorOptions& options) {
  gathers_.synchronize_each = reduces_.synchronize_each = options.sync_collectives;
  gathers_.poison(options.poison);
  reduces_.poison(options.poison);
}

void Communicators::catch_up() {
  gathers_.catch_up();
  reduces_.catch_up();
}

void Communicators::begin_recording() {
  gathers_.record();
  reduces_.record();
}

void Communicators::join() {
  gathers_.join();
  reduces_.join();
}

void Communicators::join_whatever_happened() {
  for (auto* comm : {&gathers_, &reduces_}) {
    try {
      comm->join();  // or the capture could not even be ended
    } catch (const c10::Error&) {
      // It is lost already, by what could not be captured. Ending it is all that is left to do.
    }
  }
}

void Communicators::end_recording() {
  gathers_.stop_recording();
  reduces_.stop_recording();
}

}  // namespace lightning_zero
