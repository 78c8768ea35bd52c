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
  Meetings end_recording();
  // A replay with such meetings is next: throws when this rank must not go on. And it has been started:
  // counts them as a run would have, and has the watchdog look for the replay's end.
  void before_replay(const Meetings& graph);
  void after_replay(const Meetings& graph);
  // See Communicator; of the first for which there is a reason.
  std::string why_not_captured() const;

 private:
  const Context& context_;
  Line line_;
  Communicator gathers_, reduces_;
  std::optional<Communicator> control_;
  at::Tensor replays_, replays_ended_;  // how many with meetings: on the device, and in memory of the host
};

}  // namespace lightning_zero
