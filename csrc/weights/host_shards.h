// Copies of host shards, in the dtypes in which compiled code reads weights: so that hosts exchange weights
// once per step, and not for each gather. See [Note: hosts] in context.h.
#pragma once

#include <vector>

#include "context.h"
#include "transport/communicators.h"

namespace lightning_zero {

class HostShards {
 public:
  HostShards(Context& context, Communicators& comms) : context_(context), comms_(comms) {}

  // Whether parameters have such copies (compute copies, full-precision copies), on every rank.
  bool any() const;
  // Whether one of them is older than what it is a copy of on this rank.
  bool any_stale() const;
  // Whether some rank says yes; all ranks ask together. Blocks the host.
  bool on_any_rank(bool yes);
  // Writes this rank's part of all copies, on the current stream, which has waited for whoever reads them,
  // and fetches the other hosts'; on every rank.
  Pending refresh();

 private:
  Context& context_;
  Communicators& comms_;
};

}  // namespace lightning_zero
