// The process groups of one executor, each with a stream of its own where devices have streams.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "context.h"
#include "runtime/arrivals.h"
#include "transport/communicator.h"

namespace lightning_zero {

class Communicators {
 public:
  // Names of process groups: of the weights' collectives inside a host, and across hosts; of the gradients';
  // and one of all ranks on CPUs, for agreements. Where there is one host, nothing goes across: ""; where
  // each holds a replica, no weights do.
  struct Names {
    std::string gathers, gathers_across, reduces, reduces_across, control;
  };
  // Tells `context` which rank this is, and of how many.
  Communicators(Context& context, const Names& names);

  Communicator& gathers() { return gathers_; }
  Communicator& reduces() { return reduces_; }
  Communicator* gathers_across() { return gathers_across_.get(); }
  Communicator* reduces_across() { return reduces_across_.get(); }
  Communicator* control() { return control_ ? &*control_ : nullptr; }  // null where there is one rank

  // Of what comes across hosts; null where no rank reads another's memory, and no graph waits.
  void take(std::unique_ptr<Arrivals> arrivals);
  Arrivals* arrivals() { return arrivals_.get(); }

  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);
  void configure(const ExecutorOptions& options);
  // See SlowLink: what crosses hosts, from now on. Null: none.
  void slow_down(const std::shared_ptr<SlowLink>& link);
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
  std::string why_not_captured();

 private:
  std::vector<Communicator*> on_device();

  const Context& context_;
  Line line_;
  Communicator gathers_, reduces_;
  std::unique_ptr<Communicator> gathers_across_, reduces_across_;  // null where nothing goes across
  std::optional<Communicator> control_;
  std::unique_ptr<Arrivals> arrivals_;
  at::Tensor replays_, replays_ended_;  // how many with meetings: on the device, and in memory of the host
};

}  // namespace lightning_zero
