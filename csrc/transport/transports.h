// Which transports there are: made and chosen here, and set up from Python with the memory that they need.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "runtime/turns.h"
#include "transport/communicators.h"
#include "transport/row_means.h"
#include "transport/transport.h"

namespace lightning_zero {

class Transports {
 public:
  Transports(Context& context, Communicators& communicators);

  // The best first; the last can gather everything.
  std::vector<std::unique_ptr<GatherTransport>> make_gathers(WeightMemory& memory);
  ReduceTransport& reduce() { return *reduce_; }

  // Memory of each rank that this one can write, of two halves, a multiple of staging_unit() bytes. See
  // [Note: one-sided reduce-scatter]. `group_name`: by which they are symmetric memory, on an accelerator.
  void set_staging(std::vector<at::Tensor> staging, const std::string& group_name, int64_t timeout_ms);
  int64_t staging_unit() const;
  // Barriers on devices, instead of torch's; see DeviceBarrier.
  void set_barrier(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words);
  // Debugging: see SlowLink, between hosts; 0: as fast as can be. `code`: of its kernel, on a device.
  void limit_cross_host_bandwidth(const std::optional<at::Tensor>& code, double bytes_per_s);
  // Kernels that add up what ranks have sent; see RowMeans.
  void set_mean_kernels(const at::Tensor& code);
  // Whether one of them has written, or added, the mean over the rows of `from` to `to`. For their tests:
  // nobody else can reach them alone.
  bool mean_rows(const at::Tensor& to, const at::Tensor& from, bool add) const {
    return means_(to, from, add);
  }

  // Of each rank's number of its turn; and on devices, where there is a barrier: the kernels of turns.cu, and
  // of each rank a number for each rank.
  std::unique_ptr<Turns> make_turns(std::vector<at::Tensor> numbers);
  std::unique_ptr<Turns> make_device_turns(const at::Tensor& code, std::vector<at::Tensor> rows);

  // With several hosts: what they exchange is announced to the ranks of this one that read it, see Arrivals;
  // on a CPU by numbers, on a device by kernels of arrivals.cu, after set_barrier() where that is called. Not
  // inside a graph.
  void set_remote_signals(std::vector<at::Tensor> numbers);
  void set_device_remote_signals(const at::Tensor& code, std::vector<at::Tensor> rows);

  // A stage of training or evaluation begins, on every rank: steps are counted alike from now on, although an
  // exception may have ended the stage before at another step on each.
  void begin_stage();
  // A training step begins, on every rank; returns its number.
  int64_t next_step() { return ++steps_; }
  // What ranks had missed of each other in an interrupted one is over.
  void begin_step(bool in_backward);
  // A backward was interrupted here, at another point than on peers: lets their devices through their
  // barriers.
  void interrupt();
  void close();

 private:
  void reduce_by_collective();
  void reduce_by(std::unique_ptr<ReduceTransport> inside);  // and across hosts, where there are several

  Context& context_;
  Communicators& communicators_;
  std::unique_ptr<ReduceTransport> reduce_;
  RowMeans means_;
  std::shared_ptr<DeviceBarrier> barrier_;
  int64_t steps_ = 0;         // training steps begun, of the barrier and of turns
  bool interrupted_ = false;  // devices were let through their barriers
};

}  // namespace lightning_zero
