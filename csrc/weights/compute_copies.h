// Copies of this rank's shards: in the dtype that is computed in (a parameter's compute copy), or in the
// shard's own where peers may not read shards themselves (its full-precision copy).
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
  bool has_memory() const { return !memory_.empty(); }

  bool is_stale(const ParamRecord& record) const;
  // Parameters whose copies are stale; or all that have one.
  std::vector<ParamRecord*> stale(bool everything) const;
  // The compute copy of one parameter; those of all, in few kernels; and full-precision copies.
  void write(ParamRecord& record);
  void write_all();
  void write_full_precision(const std::vector<ParamRecord*>& records);

  void close() { memory_.clear(); }

  // While a graph is recorded nothing may be written: a replay would do it each time.
  bool recording = false;

 private:
  void is_written(ParamRecord& record);

  Context& context_;
  std::vector<std::pair<at::Tensor, at::Tensor>> memory_;
};

}  // namespace lightning_zero
