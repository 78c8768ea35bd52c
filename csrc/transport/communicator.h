// Collectives over one c10d process group, on one stream of our own.
//
// Everything goes through c10d::ProcessGroup so that the watchdog, timeouts and the flight recorder see it.
// On an accelerator the collective is queued on our stream and nothing waits on the host; on a CPU it runs
// in the process group's threads and is waited for through its Work. `Pending` hides the difference.
#pragma once

#include <functional>
#include <optional>
#include <random>
#include <string>

#include "ranks.h"
#include "runtime/barrier.h"
#include "runtime/watchdog.h"
#include "transport/copies.h"
#include "transport/line.h"
#include "transport/pending.h"
#include "transport/slow_link.h"

namespace c10d {
class ProcessGroup;
}

namespace lightning_zero {

class Communicator {
 public:
  // `line`: in which its collectives stand while a graph is recorded, with those of others.
  Communicator(const std::string& group_name, const c10::Device& device, SequenceId lane, Line& line);
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
  Pending behind(Pending first, const std::function<Pending()>& launch);
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
  void use_device_barrier(std::shared_ptr<DeviceBarrier> barrier, int lane);

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
  void catch_up();

  // While a graph of the device is recorded: everything on our stream belongs to it. join(): the current
  // stream waits for ours, if there was anything.
  bool record(bool on);
  void join();
  // Why no graph can hold collectives of this process group; empty where one can. On a CPU nothing is held.
  std::string why_not_captured() const;

  // Debugging: wait on the host before and after each collective, so that an error shows where it happened.
  bool synchronize_each = false;

  // Debugging: its collectives cross this link. Null: none.
  std::shared_ptr<SlowLink> link;

  // Debugging, on a CPU: what a collective writes is NaN until it has been waited for, and ranks run at
  // random speeds, so that whoever reads too early, or relies on the order in which ranks arrive, gets
  // another result.
  void poison(bool on);

 private:
  int rank() const;
  int size() const;

  // Where to gather instead: `output` is poisoned, and receives the values when the collective is waited for.
  at::Tensor scratch(const at::Tensor& output, std::vector<std::pair<at::Tensor, at::Tensor>>& copies);
  void jitter();

  void refuse_in_graph(const char* what) const;
  // In the line, on the current stream.
  void signal_all();

  // `bytes`: of what all ranks have together, in which each of them has an equal part.
  template <class Launch>
  Pending launch(const char* what, Launch&& launch, std::function<void()> then, int64_t bytes = 0);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  SequenceId lane_;
  c10::Stream stream_;
  Line& line_;
  c10::intrusive_ptr<Watchdog> watchdog_;
  bool recording_ = false, used_ = false;
  std::vector<c10::Stream> lanes_;          // for copies beside each other in graphs
  std::function<void()> signal_all_;        // and wait for all, on the current stream
  at::Tensor token_, tokens_;               // what a barrier gathers
  std::optional<std::mt19937> jitter_rng_;  // when poisoning
};

}  // namespace lightning_zero
