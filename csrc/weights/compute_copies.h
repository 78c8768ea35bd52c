// Copies of this rank's shards: in the dtype that is computed in (a parameter's compute copy), or in the
// shard's own where peers may not read shards themselves (its full-precision copy).
//
// [Note: shards on the host] A shard in the host's memory is read over a link that is slower than the
// device's memory by two orders of magnitude, so its copy is written where the shard is on the device anyway:
// by the optimizer's step. It is not written again before a training step, as others are, in case somebody
// has changed the shard without a word: whoever is no optimizer must tell, as where ranks take turns.
#pragma once

#include <utility>
#include <vector>

#include "context.h"

namespace lightning_zero {

class ComputeCopies {
 public:
  explicit ComputeCopies(Context& context) : context_(context) {}

  // Copies that are neighbours in memory, of shards that are likewise: written in one kernel.
  void add_memory(at::Tensor copies, at::Tensor shards);
  bool has_memory() const;

  // Whether some are gradients that nobody wants: no step has come, and where ranks take turns nobody writes.
  bool any_lost() const;
  // Not where it is a gradient that somebody wants.
  bool is_stale(const ParamRecord& record) const;
  // Parameters whose copies are stale; or all that have one.
  std::vector<ParamRecord*> stale(bool everything) const;
  // The compute copy of one parameter; those of all, in few kernels; and full-precision copies.
  void write(ParamRecord& record);
  void write_all();  // of shards on the host only stale ones
  void write_full_precision(const std::vector<ParamRecord*>& records);

  // -- of shards on the host
  // Indices of those whose copies are as they should be.
  std::vector<int64_t> written() const;
  // An optimizer is about to write these copies, and has.
  void mark_compute_shards_written(std::vector<int64_t> indices, bool written);
  // Changes when somebody who is no optimizer says that shards change.
  int64_t told() const {
    Lock lock(context_.mutex);
    return context_.told;
  }

  void close() { memory_.clear(); }

  // While a graph is recorded nothing may be written: a replay would do it each time.
  bool recording = false;

 private:
  Stamp now(const ParamRecord& record) const;
  void is_written(ParamRecord& record);

  Context& context_;
  std::vector<std::pair<at::Tensor, at::Tensor>> memory_;
};

}  // namespace lightning_zero
