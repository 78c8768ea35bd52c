// Copies of host shards, in the dtypes in which compiled code reads weights: so that hosts exchange weights
// once per step, and not for each gather. See [Note: hosts] in context.h, and exchange.h.
#pragma once

#include <vector>

#include "context.h"
#include "transport/communicators.h"
#include "weights/exchange.h"

namespace lightning_zero {

class HostShards {
 public:
  HostShards(Context& context, Communicators& comms)
      : context_(context), comms_(comms), exchange_(context, comms) {}

  // Whether parameters have such copies (compute copies, full-precision copies), on every rank.
  bool any() const;
  // Whether one of them is older than what it is a copy of on this rank.
  bool any_stale() const;
  // Whether some rank says yes; all ranks ask together, and agree on the order of first use. Blocks the host.
  bool on_any_rank(bool yes);
  // Writes this rank's part of all copies, on the current stream, which has waited for whoever reads them,
  // and begins to fetch the other hosts'; on every rank.
  void refresh();

  // The host shard in `dtype`, which is there. Before compiled code reads it: notes that it does. Code that
  // is not compiled must not count: only its backward reads most weights here, the last layer's first.
  ShardCopy& read(ParamRecord& record, at::ScalarType dtype, bool compiled);
  HostExchange& exchange() { return exchange_; }

 private:
  Context& context_;
  Communicators& comms_;
  HostExchange exchange_;
  // In the order of their first use, as this rank has seen it, and a number that tells it apart from others;
  // of these so many first ones are in that order on every rank.
  std::vector<ShardCopy*> used_;
  int64_t parts_ = 0;  // exchanged so far, as all ranks count
  uint64_t order_ = 0;
  size_t agreed_ = 0;
};

}  // namespace lightning_zero
