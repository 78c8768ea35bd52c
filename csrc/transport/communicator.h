// Process groups with their streams, and the order of their collectives in CUDA graphs.
//
// [Note: collectives in graphs] The kernel of a collective or a barrier occupies the device until all ranks
// have started theirs. On parallel branches of a graph, such kernels could run in different orders on
// different ranks, or block the kernels that a peer waits for, and all ranks would hang. So during a capture
// all collectives, of weights and of gradients, are chained in launch order: C1, C2, ... Copies, sums and the
// model's kernels remain concurrent.
//
// Proof that no rank hangs. The graph ancestors of C(i) precede it, and therefore every C(j) with j >= i, in
// any order in which a queue can hold the graph's nodes. Only C(j) with j < i can block C(i). Consider the
// first collective that has not completed on all ranks. Its predecessors have completed, so its ancestors
// complete on each rank and it starts. After it has started on all ranks, it completes.
//
// This also holds for a rank that runs a pass eagerly while others replay it. It launches the same
// collectives in the same order, since ranks have agreed on the plan, on two streams and after their inputs.
// Everything ahead of C(i) in a queue was launched before it. That a later collective may start earlier is
// harmless, as it is if all ranks run. So ranks need not agree on who replays: one may still warm up, have
// failed to capture, or have a batch of another length, since lengths of batches change no collective.
//
// This requires that collectives behave alike inside and outside of graphs. NCCL's do, unless it registers
// the memory of graphs (NCCL_GRAPH_REGISTER, on by default): then it exchanges addresses at capture and uses
// other channels. See Communicator::no_capture_reason.
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

// Numbers of collectives in which devices wait for each other.
struct CollectiveCounts {
  int64_t gathers = 0, reduces = 0;
  bool inter_host_gathers = false;  // some are across hosts
  bool any() const { return gathers + reduces > 0; }
};

class CollectiveOrder {
 public:
  void begin_recording() { recording_ = true; }
  // Return the counts for a replay.
  CollectiveCounts end_recording() {
    recording_ = false;
    last_ = {};
    return std::exchange(counts_, {});
  }
  void add(SequenceId sequence) { ++(sequence == SequenceId::GATHER ? counts_.gathers : counts_.reduces); }

  // Called around the launch of a collective on `stream`. No effect outside of a capture.
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

// Debugging: emulates a network with limited bandwidth between hosts.
//
// Data across hosts arrives no sooner than over a network card of that bandwidth, serially, for weights and
// gradients together. Other work continues. On a CPU, the host sleeps when it waits for data that has not
// arrived. On a device, a kernel blocks the stream that sent the data, also in graphs. The link is reserved
// when the collective is queued, so that its own duration is not counted twice.
class EmulatedLink {
 public:
  using Clock = std::chrono::steady_clock;

  // `code`: the compiled kernels.cu; none on a CPU.
  EmulatedLink(double bytes_per_s, const c10::Device& device, const std::optional<at::Tensor>& code);

  // On a CPU: return the arrival time of `bytes` that are sent now.
  Clock::time_point arrival(int64_t bytes);
  // On a device: call reserve() before and hold() after sending `bytes` on `stream`. Later work on the stream
  // begins when the data has arrived. At most one transfer per sequence and stream.
  void reserve(int64_t bytes, const c10::Stream& stream, SequenceId sequence) const;
  void hold(const c10::Stream& stream, SequenceId sequence) const;

 private:
  uint64_t* time(int64_t which) const;

  double bytes_per_s_;
  std::mutex mutex_;
  Clock::time_point free_at_{};
  void* reserve_ = nullptr;
  void* hold_ = nullptr;
  at::Tensor times_;  // on the device: when the link is free, and by sequence when data arrives
};

// Collectives over one c10d process group, on one stream.
//
// All collectives go through c10d::ProcessGroup, so that its watchdog, timeouts and the flight recorder see
// them. On an accelerator, a collective is queued on our stream and the host does not wait. On a CPU, it runs
// in the process group's threads and its Work is waited for. `Pending` hides the difference.
class Communicator {
 public:
  // `order`: chains its collectives with those of other communicators during a capture.
  Communicator(const std::string& group_name, const c10::Device& device, SequenceId sequence,
               CollectiveOrder& order);
  ~Communicator();

  // Set the watchdog that counts collectives here and observes waits for them.
  void watch(c10::intrusive_ptr<Watchdog> watchdog) { watchdog_ = std::move(watchdog); }

  Ranks ranks() const { return {rank(), size()}; }

  // `output`: size() * input.numel() elements of input's dtype. With `cast_to`, the input is cast to it
  // first, on our stream. Both tensors are one-dimensional and contiguous. The output must be allocated on
  // the caller's stream; freeing it after the wait is then safe in stream order, without record_stream.
  Pending all_gather(at::Tensor output, at::Tensor input,
                     std::optional<at::ScalarType> cast_to = std::nullopt);

  // Several all-gathers in one launch, each directly into its output. Pairs may have different dtypes.
  Pending all_gather_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);

  // The equivalent by copies of this rank alone: (*sources[i])[r] is the input of rank r. The caller ensures
  // that the sources are readable.
  Pending copy_group(std::vector<at::Tensor> outputs,
                     const std::vector<const std::vector<at::Tensor>*>& sources);

  // Queue copies to any memory on the current stream, which is ours.
  void copy(const std::vector<Copy>& copies);

  // Run `launch` here after `first`, which was launched elsewhere. On an accelerator, the caller's stream
  // waits for neither.
  Pending run_after(Pending first, const std::function<Pending()>& launch);
  // Run `work`, which queues work on our stream, after the work that the caller has queued.
  Pending run(const std::function<void()>& work);

  // Work that is queued on our stream afterwards begins after all earlier work of all ranks.
  Pending barrier();
  // The equivalent on the current stream, which is ours; a CPU blocks.
  void barrier_on_current_stream();
  // Use signals in symmetric memory for barriers. They take a tenth of a collective's host time, and each
  // bucket needs one. The process group's watchdog does not see them, but it sees the work queued after them,
  // and missing ranks are noticed on the control group. Each stream with barriers needs its own `channel`.
  void use_symmetric_barrier(const at::Tensor& memory, const std::string& group_name, int64_t timeout_ms,
                             int channel);
  // Use our kernel for barriers, whose waits the host can end.
  void use_device_barrier(std::shared_ptr<DeviceBarrier> barrier, int channel);

  // Several reduce-scatters in one launch. inputs[i]: size() * outputs[i].numel() elements. `all_inputs`: on
  // a CPU the memory of all inputs, which is overwritten. `then` runs on our stream after the outputs are
  // complete.
  Pending reduce_scatter_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                               at::Tensor all_inputs, std::function<void()> then);

  // Elementwise sum over ranks, in place, bitwise equal on all ranks. `then` as above.
  Pending all_reduce(at::Tensor values, std::function<void()> then);

  // Elementwise maximum over ranks, in place. Blocks the host. Requires a CPU group.
  void all_reduce_max(std::vector<int64_t>& values, const char* what);

  // Make the current stream wait for ours.
  void block_current_stream();

  // During a capture, all work on our stream belongs to the graph. join() makes the current stream wait for
  // ours, if it was used.
  bool set_recording(bool on);
  void join();
  // Return the reason why graphs cannot contain collectives of this process group; empty if there is none. On
  // a CPU nothing is captured.
  std::string no_capture_reason() const;

  // Debugging: wait on the host before and after each collective, so that errors show where they occur.
  bool synchronize_each = false;

  // Debugging: the emulated link of these collectives; null without one.
  std::shared_ptr<EmulatedLink> link;

  // Debugging, on a CPU: the output of a collective is NaN until it has been waited for, and ranks run at
  // random speeds. So premature reads, and a dependence on the order of ranks, change the result.
  void set_nan_fill(bool on);

 private:
  int rank() const;
  int size() const;

  // Return memory to gather into instead. `output` is filled with NaN and receives the values when the
  // collective is waited for.
  at::Tensor scratch(const at::Tensor& output, std::vector<std::pair<at::Tensor, at::Tensor>>& copies);
  void jitter();

  void check_capturable(const char* what) const;
  // In launch order, on the current stream.
  void signal_all();

  // `what`: name of the collective; empty for work of this rank alone. `bytes`: size over all ranks, which
  // contribute equal parts.
  template <class Launch>
  Pending launch(const char* what, Launch&& launch, std::function<void()> then, int64_t bytes = 0);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  SequenceId sequence_;
  c10::Stream stream_;
  CollectiveOrder& order_;
  c10::intrusive_ptr<Watchdog> watchdog_;
  bool recording_ = false, used_ = false;
  std::vector<c10::Stream> side_streams_;   // for concurrent copies in graphs
  std::function<void()> signal_all_;        // signals all ranks and waits for them, on the current stream
  at::Tensor token_, tokens_;               // input and output of a barrier
  std::optional<std::mt19937> jitter_rng_;  // with NaN fill
};

// The process groups of one executor, each with its own stream on devices.
class Communicators {
 public:
  // Names of the process groups: all-gathers inside a host and across hosts, reductions inside a host and
  // across hosts, and a CPU group of all ranks for agreements. Groups across hosts are "" with one host; that
  // of all-gathers also with replicas.
  struct Names {
    std::string gathers, inter_host_gathers, reduces, inter_host_reduces, control;
  };
  // Sets the rank and the numbers of ranks in `context`.
  Communicators(Context& context, const Names& names);

  Communicator& gathers() { return gathers_; }
  Communicator& reduces() { return reduces_; }
  Communicator* inter_host_gathers() { return inter_host_gathers_.get(); }
  Communicator* inter_host_reduces() { return inter_host_reduces_.get(); }
  Communicator* control() { return control_ ? &*control_ : nullptr; }  // null with one rank

  // Set the signals of host exchanges. Not needed if no rank reads another's memory and no graph waits.
  void set_remote_signals(std::unique_ptr<RemoteSignals> remote_signals);
  RemoteSignals* remote_signals() { return remote_signals_.get(); }

  void watch(const c10::intrusive_ptr<Watchdog>& watchdog);
  void configure(const ExecutorOptions& options);
  // Set the emulated link between hosts; null: none.
  void emulate_link(const std::shared_ptr<EmulatedLink>& link);
  // Make the current stream wait for all communicators.
  void block_current_stream();

  // ---- captures, see Communicator
  void begin_recording();
  void join();
  void join_ignoring_errors();
  CollectiveCounts end_recording();
  // Called around a replay with these collectives. before_replay() throws if this rank must not continue.
  // after_replay() counts the collectives as a run would, and lets the watchdog observe the end of the
  // replay.
  void before_replay(const CollectiveCounts& graph);
  void after_replay(const CollectiveCounts& graph);
  // See Communicator; the first reason of any communicator.
  std::string no_capture_reason();

 private:
  std::vector<Communicator*> on_device();

  const Context& context_;
  CollectiveOrder order_;
  Communicator gathers_, reduces_;
  std::unique_ptr<Communicator> inter_host_gathers_, inter_host_reduces_;  // null with one host
  std::optional<Communicator> control_;
  std::unique_ptr<RemoteSignals> remote_signals_;
  // number of replays with collectives: on the device, and in host memory
  at::Tensor replays_, replays_ended_;
};

}  // namespace lightning_zero
