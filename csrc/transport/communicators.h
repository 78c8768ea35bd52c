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
    std::string gathers, inter_host_gathers, reduces, inter_host_reduces, control;
  };
  // Tells `context` which rank this is, and of how many.
  Communicators(Context& context, const Names& names);

  Communicator& gathers() { return gathers_; }
  Communicator& reduces() { return reduces_; }
  Communicator* inter_host_gathers() { return inter_host_gathers_.get(); }
  Communicator* inter_host_reduces() { return inter_host_reduces_.get(); }
  Communicator* control() { return control_ ? &*control_ : nullptr; }  // null where there is one rank

  // Of what comes across hosts; null where no rank reads another's memory, and no graph waits.
  void set_remote_signals(std::unique_ptr<RemoteSignals> remote_signals);
  RemoteSignals* remote_signals() { return remote_signals_.get(); }

  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);
  void configure(const ExecutorOptions& options);
  // See SlowLink: what crosses hosts, from now on. Null: none.
  void emulate_link(const std::shared_ptr<EmulatedLink>& link);
  // The current stream waits for what has been queued on both.
  void block_current_stream();

  // While a graph of the device is recorded, see Communicator.
  void begin_recording();
  void join();
  void join_ignoring_errors();
  CollectiveCounts end_recording();
  // A replay with such meetings is next: throws when this rank must not go on. And it has been started:
  // counts them as a run would have, and has the watchdog look for the replay's end.
  void before_replay(const CollectiveCounts& graph);
  void after_replay(const CollectiveCounts& graph);
  // See Communicator; of the first for which there is a reason.
  std::string no_capture_reason();

 private:
  std::vector<Communicator*> on_device();

  const Context& context_;
  CollectiveOrder order_;
  Communicator gathers_, reduces_;
  std::unique_ptr<Communicator> inter_host_gathers_, inter_host_reduces_;  // null where nothing goes across
  std::optional<Communicator> control_;
  std::unique_ptr<RemoteSignals> remote_signals_;
  at::Tensor replays_, replays_ended_;  // how many with meetings: on the device, and in memory of the host
};

}  // namespace lightning_zero
