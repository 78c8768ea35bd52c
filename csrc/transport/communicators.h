// The process groups of one executor, each with a stream of its own where devices have streams.
#pragma once

#include <optional>
#include <string>

#include "context.h"
#include "transport/communicator.h"

namespace lightning_zero {

class Communicators {
 public:
  // Names of process groups: of the weights' collectives; of the gradients'; and one on CPUs, for agreements.
  // Tells `context` which rank this is, and of how many.
  Communicators(Context& context, const std::string& gather_group, const std::string& reduce_group,
                const std::string& control_group);

  Communicator& gathers() { return gathers_; }
  Communicator& reduces() { return reduces_; }
  Communicator* control() { return control_ ? &*control_ : nullptr; }  // null where there is one rank

  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);
  void configure(const ExecutorOptions& options);
  // The current stream waits for what has been queued on both.
  void catch_up();

  // While a graph of the device is recorded, see Communicator.
  void begin_recording();
  void join();
  void join_whatever_happened();
  void end_recording();

 private:
  Communicator gathers_, reduces_;
  std::optional<Communicator> control_;
};

}  // namespace lightning_zero
