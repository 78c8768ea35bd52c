// The one line in which what waits for other ranks stands in a graph of the device.
//
// [Note: collectives in graphs] The kernel of a collective, and that of a barrier, holds its place on the
// device until all ranks have come to theirs. On several branches of a graph such kernels might come in
// another order on each rank, or stand in one of the device's queues before what a peer waits for; nobody
// would ever go on. So while a graph is recorded, all of them, of weights and of gradients, come one behind
// the other, in the order in which they were launched: C1, C2, ... Nothing else is put in line: copies, sums
// and what the model computes go on beside them.
//
// Why nobody waits for ever. What C(i) needs on a rank (its ancestors in the graph) comes before C(i), and so
// before every C(j), j >= i, in any order in which a queue can hold the graph's nodes, since that order is
// one of the graph's own. Only C(j) with j < i can stand in its way. Take the first collective that is not
// over on all ranks: those before it are, so on each rank what it needs gets done and it begins; and once it
// has begun everywhere, it ends.
//
// The same holds for a rank that runs what others replay. It launches the same collectives in the same order
// (ranks have agreed on the plan), on two streams, and each behind what it needs: whatever stands before C(i)
// in a queue was launched before it. That a later one may begin earlier there does no harm, as it does none
// where all ranks run. So ranks need not agree on who replays and who runs: one may still be warming up, have
// failed to capture, or have a batch of another length, and the lengths of batches change no collective.
//
// That takes collectives that do the same in a graph and outside. NCCL's do, unless it registers the memory
// that graphs name (NCCL_GRAPH_REGISTER, which is on by default): then it exchanges addresses while it is
// captured, and uses other channels. See Communicator::why_not_captured.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "cuda/cuda_api.h"
#include "cuda/streams.h"
#include "sync/barrier.h"
#include "sync/signals.h"
#include "transport/pending.h"
#include "watchdog/rank_state.h"
#include "watchdog/watchdog.h"

namespace c10d {
class ProcessGroup;
}

namespace lightning_zero {

// Of ranks, in which their devices wait for each other.
struct CollectiveCounts {
  int64_t gathers = 0, reduces = 0;
  bool inter_host_gathers = false;  // some of these are of several hosts
  bool any() const { return gathers + reduces > 0; }
};

class CollectiveOrder {
 public:
  void begin_recording() { recording_ = true; }
  // What a replay will have of them, which recording had not.
  CollectiveCounts end_recording() {
    recording_ = false;
    last_ = {};
    return std::exchange(counts_, {});
  }
  void add(SequenceId sequence) { ++(sequence == SequenceId::GATHER ? counts_.gathers : counts_.reduces); }

  // Around the launch of what waits for other ranks, on `stream`. Nothing where nothing is recorded.
  void enter(const c10::Stream& stream) const { last_.block(stream); }
  void leave(const c10::Stream& stream) {
    if (recording_)
      last_.record(stream);
  }

 private:
  bool recording_ = false;
  Fence last_;
  CollectiveCounts counts_;
};

// Debugging: a network between hosts that is as slow as somebody wants it, where there is none.
//
// What goes across hosts arrives no sooner than a network card of that bandwidth could bring it, one thing
// after the other, weights and gradients alike. Beside it everything goes on. On a CPU the host sleeps where
// it waits for what has not arrived; on a device a kernel holds up the stream on which it was sent, in graphs
// too. It takes the link where the collective is queued, so that what this takes by itself is not counted
// twice.

class EmulatedLink {
 public:
  using Clock = std::chrono::steady_clock;

  // `code`: bytes that the device's driver loads, of slow_link.cu; none on a CPU.
  EmulatedLink(double bytes_per_s, const c10::Device& device, const std::optional<at::Tensor>& code);

  // On a CPU: when `bytes` that are sent now arrive.
  Clock::time_point arrival(int64_t bytes);
  // On a device, around what sends `bytes`, where `stream` comes to it: what the stream is given behind
  // hold() begins when they have arrived. One `lane` after the other on a stream.
  void reserve(int64_t bytes, const c10::Stream& stream, SequenceId sequence) const;
  void hold(const c10::Stream& stream, SequenceId sequence) const;

 private:
  uint64_t* time(int64_t which) const;

  double bytes_per_s_;
  std::mutex mutex_;
  Clock::time_point free_at_{};
  void* reserve_ = nullptr;
  void* hold_ = nullptr;
  at::Tensor times_;  // the device's own: when the link is free, and by lane when what is sent arrives
};

// Collectives over one c10d process group, on one stream of our own.
//
// Everything goes through c10d::ProcessGroup so that the watchdog, timeouts and the flight recorder see it.
// On an accelerator the collective is queued on our stream and nothing waits on the host; on a CPU it runs
// in the process group's threads and is waited for through its Work. `Pending` hides the difference.

class Communicator {
 public:
  // `line`: in which its collectives stand while a graph is recorded, with those of others.
  Communicator(const std::string& group_name, const c10::Device& device, SequenceId sequence,
               CollectiveOrder& order);
  ~Communicator();

  // Counts what ranks do together here, and watches over waits for it.
  void watch(c10::intrusive_ptr<Watchdog> watchdog) { watchdog_ = std::move(watchdog); }

  Ranks ranks() const { return {rank(), size()}; }

  // output: size() * input.numel() elements of input's dtype. When `cast_to` is given the input is cast to
  // it first, on our stream. Both tensors are 1-D and contiguous. The output must have been allocated on the
  // caller's stream: freeing it after the wait is then safe in stream order, with no record_stream.
  Pending all_gather(at::Tensor output, at::Tensor input,
                     std::optional<at::ScalarType> cast_to = std::nullopt);

  // Several all-gathers in one launch, each straight into its output; dtypes may differ from pair to pair.
  Pending all_gather_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);

  // The same by copies that this rank makes alone: (*sources[i])[r] is what rank r would have put in. The
  // caller sees to it that they may be read.
  Pending copy_group(std::vector<at::Tensor> outputs,
                     const std::vector<const std::vector<at::Tensor>*>& sources);

  // The same on the current stream, ours, and wherever they go.
  void copy(const std::vector<Copy>& copies);

  // What `launch` launches here, behind what has been launched elsewhere. On an accelerator the caller's
  // stream waits for neither.
  Pending run_after(Pending first, const std::function<Pending()>& launch);
  // Whatever `work` queues, on our stream, behind what the caller has queued.
  Pending run(const std::function<void()>& work);

  // Work queued on our stream after it begins once all ranks' work queued before it has ended.
  Pending barrier();
  // The same on the current stream, ours; a CPU waits.
  void barrier_on_current_stream();
  // Barriers are signals in symmetric memory from now on: a tenth of a collective's time on the host, and
  // there is one for each bucket. The process group's watchdog does not see these; it sees what is queued
  // behind them, and ranks that are gone are missed on the control group. `channel`: of the signals; one for
  // each stream on which there are barriers.
  void use_symmetric_barrier(const at::Tensor& memory, const std::string& group_name, int64_t timeout_ms,
                             int channel);
  // The same by a kernel of our own, whose waits the host can end.
  void use_device_barrier(std::shared_ptr<DeviceBarrier> barrier, int channel);

  // Several reduce-scatters in one launch. inputs[i]: size() * outputs[i].numel() elements; `all_inputs`, on
  // a CPU, is the memory they lie in, whose contents are lost. `then` runs on our stream once the outputs are
  // there.
  Pending reduce_scatter_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                               at::Tensor all_inputs, std::function<void()> then);

  // Elementwise sum over ranks, in place, the same to the bit on each. `then` as above.
  Pending all_reduce(at::Tensor values, std::function<void()> then);

  // Elementwise maximum over ranks, in place; blocks the host. The group must be a CPU one.
  void all_reduce_max(std::vector<int64_t>& values, const char* what);

  // The current stream waits for ours.
  void block_current_stream();

  // While a graph of the device is recorded: everything on our stream belongs to it. join(): the current
  // stream waits for ours, if there was anything.
  bool set_recording(bool on);
  void join();
  // Why no graph can hold collectives of this process group; empty where one can. On a CPU nothing is held.
  std::string no_capture_reason() const;

  // Debugging: wait on the host before and after each collective, so that an error shows where it happened.
  bool synchronize_each = false;

  // Debugging: its collectives cross this link. Null: none.
  std::shared_ptr<EmulatedLink> link;

  // Debugging, on a CPU: what a collective writes is NaN until it has been waited for, and ranks run at
  // random speeds, so that whoever reads too early, or relies on the order in which ranks arrive, gets
  // another result.
  void set_nan_fill(bool on);

 private:
  int rank() const;
  int size() const;

  // Where to gather instead: `output` is poisoned, and receives the values when the collective is waited for.
  at::Tensor scratch(const at::Tensor& output, std::vector<std::pair<at::Tensor, at::Tensor>>& copies);
  void jitter();

  void check_capturable(const char* what) const;
  // In the line, on the current stream.
  void signal_all();

  // `bytes`: of what all ranks have together, in which each of them has an equal part.
  template <class Launch>
  Pending launch(const char* what, Launch&& launch, std::function<void()> then, int64_t bytes = 0);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  SequenceId sequence_;
  c10::Stream stream_;
  CollectiveOrder& order_;
  c10::intrusive_ptr<Watchdog> watchdog_;
  bool recording_ = false, used_ = false;
  std::vector<c10::Stream> side_streams_;   // for copies beside each other in graphs
  std::function<void()> signal_all_;        // and wait for all, on the current stream
  at::Tensor token_, tokens_;               // what a barrier gathers
  std::optional<std::mt19937> jitter_rng_;  // when poisoning
};

// The process groups of one executor, each with a stream of its own where devices have streams.

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
