// Exchanges host shards between hosts in parts. The parts that are read first arrive first, and are read
// while the rest is in transit.
//
// [Note: host exchange] An exchange sends all parts together. Each part is one launch of all-gathers across
// hosts, in place, and nothing waits for them there. A gather inside the host waits for its part. A
// collective waits for the part of this rank's host shard. A peer copy waits for the parts of all ranks of
// the host, which report them by RemoteSignals. On a CPU, a rank has a part after it has waited for the part
// itself, which every rank does when it reads the part. On a device, the stream of weights waits. A CUDA
// graph cannot wait for events from before its capture, so a kernel in the graph waits for signals. Every
// rank queues a whole exchange before anything that waits for it, so such a kernel cannot block what it waits
// for.
//
// Parts follow the order in which compiled code first read the weights. Ranks compare that order when they
// agree on an exchange. Until all ranks have the same order, parts follow the order of registration. A graph
// that was captured with another order waits for the wrong parts, so it is replayed after the whole exchange,
// and captured again.
#pragma once

#include <array>
#include <vector>

#include "context.h"
#include "sync/signals.h"
#include "transport/communicator.h"

namespace lightning_zero {

class HostExchange {
 public:
  HostExchange(Context& context, Communicators& comms) : context_(context), comms_(comms) {}

  // Send all copies. This rank's part of each must have been written on the current stream. Call it after
  // end(), and after all ranks of the host have read the copies. Parts are numbered from `first` + 1, which
  // is the same on every rank.
  void begin(const std::vector<ShardCopy*>& copies, int64_t first);
  // Return the number of the last part that this rank knows. An exception may have kept the rank from an
  // exchange that others began.
  int64_t last() const { return first_ + planned_; }
  // Wait for the last exchange; on a device, make the current stream wait.
  void end();

  // Let the next work of `reader` read this host shard, or those of all ranks of the host with `from_peers`.
  void wait_until_readable(const ShardCopy& copy, Reader reader, bool from_peers);
  // Return true if graphs contain waits. Otherwise exchanges must end before a replay.
  bool in_graphs() const { return comms_.remote_signals() != nullptr || !has_streams(context_.device); }

  // ---- captures, see [Note: CUDA graphs]
  struct Recorded {
    // order of the parts, and the number of parts that the graph waits for
    int64_t layout_version = 0, parts = 0;
  };
  void begin_recording();
  Recorded end_recording();
  bool fits(const Recorded& graph) const {
    return graph.parts == 0 || graph.layout_version == layout_version_;
  }
  void before_replay(const Recorded& graph);
  void close() { parts_.clear(); }

 private:
  using PartsWaited = std::array<int64_t, 2>;  // by reader: the number of parts it has waited for

  void send(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  void announce_send();
  void wait_for_part(int64_t part);
  int64_t number_of(int64_t part) const { return first_ + part + 1; }

  Context& context_;
  Communicators& comms_;
  int64_t first_ = 0, planned_ = 0;  // number of parts before this exchange, and in it
  std::vector<Pending> parts_;
  int64_t layout_version_ = 0;  // changes whenever a weight of compiled code moves to another part
  int64_t received_ = 0;        // on a CPU: the number of parts this rank has waited for
  PartsWaited waited_{}, recorded_{};
  bool recording_ = false;
};

// Copies of host shards in the dtypes that compiled code reads, so that hosts exchange weights once per step
// instead of once per gather. See [Note: hosts] in context.h.
class HostShards {
 public:
  HostShards(Context& context, Communicators& comms)
      : context_(context), comms_(comms), exchange_(context, comms) {}

  // Return true if parameters have compute shards or full-precision shards; the same on every rank.
  bool any() const;
  // Return true if a copy is older than this rank's shard.
  bool any_stale() const;
  // Return true if `yes` is true on some rank. Ranks also agree on the order of first use. Collective; blocks
  // the host.
  bool on_any_rank(bool yes);
  // Write this rank's part of all copies on the current stream, which has waited for all readers, and begin
  // to receive the other hosts' parts. Collective.
  void refresh();

  // Return the host shard in `dtype`, and record that compiled code reads it. Eager code does not count: most
  // weights are read eagerly in backward only, in reverse order.
  ShardCopy& read(ParamRecord& record, at::ScalarType dtype, bool compiled);
  HostExchange& exchange() { return exchange_; }

 private:
  Context& context_;
  Communicators& comms_;
  HostExchange exchange_;
  // In the order of first use on this rank, with a hash of that order. The first `agreed_` have the same
  // order on every rank.
  std::vector<ShardCopy*> used_;
  int64_t parts_ = 0;  // exchanged so far, as all ranks count
  uint64_t order_ = 0;
  size_t agreed_ = 0;
};

}  // namespace lightning_zero
