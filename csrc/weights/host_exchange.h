// Hosts exchange their host shards, in parts: what is read first comes first, and is read while the rest is
// on its way.
//
// [Note: the exchange] All parts are sent together, where host shards are brought up to date; each is one
// launch of all-gathers across hosts, in place. Nobody waits there. Who gathers a weight inside the host
// waits for its part: for that of its own host shard, where a collective sends it on, or of the host shards
// of all ranks of the host, where it copies them out of their memory; these tell it by Arrivals. On a CPU a
// rank has got a part once it has waited for it itself, which it does where it reads it, as all ranks do. On
// a device the stream waits on which weights are gathered. A graph cannot wait for what was begun before it
// was captured, so there a kernel waits for numbers; all of an exchange is queued before whatever waits for
// it, on every rank, so no such kernel can stand in the way of what it waits for.
//
// Parts are cut in the order in which compiled code has read weights first. Whether all ranks have seen the
// same order they agree on where they agree that there is something to exchange; until they have, it is that
// of registration. A graph that was captured before waits for parts that hold other weights: it is replayed
// behind all of the next exchange, and captured anew.
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

  // All of these, each of which lies on the current stream with this rank's part written: sends them. After
  // end(), and after ranks of the host that read them. Their parts have the numbers behind `first`, which is
  // the same on every rank.
  void begin(const std::vector<ShardCopy*>& copies, int64_t first);
  // The parts of all exchanges so far have numbers up to this, as far as this rank knows: an exception may
  // have kept it from one that others began.
  int64_t last() const { return first_ + planned_; }
  // The last one is over on this rank; on a device, for what is queued on the current stream.
  void end();

  // What `reader` does next may read this host shard, of all ranks of the host where `of_peers`.
  void wait_until_readable(const ShardCopy& copy, Reader reader, bool from_peers);
  // Whether graphs hold waits; otherwise all must be over before one is replayed.
  bool in_graphs() const { return comms_.remote_signals() != nullptr || !has_streams(context_.device); }

  // -- see [Note: captured graphs]
  struct Recorded {
    int64_t layout_version = 0, parts = 0;  // how parts were cut, and how many of them the graph waits for
  };
  void begin_recording();
  Recorded end_recording();
  bool fits(const Recorded& graph) const {
    return graph.parts == 0 || graph.layout_version == layout_version_;
  }
  void before_replay(const Recorded& graph);
  void close() { parts_.clear(); }

 private:
  using PartsWaited = std::array<int64_t, 2>;  // by reader: how many parts it has waited for

  void send(std::vector<at::Tensor> whole, std::vector<at::Tensor> own);
  void announce_send();
  void wait_for_part(int64_t part);
  int64_t number_of(int64_t part) const { return first_ + part + 1; }

  Context& context_;
  Communicators& comms_;
  int64_t first_ = 0, planned_ = 0;  // numbers of parts before this exchange, and how many it has
  std::vector<Pending> parts_;
  int64_t layout_version_ =
      0;                  // another one whenever a weight that compiled code reads comes with another part
  int64_t received_ = 0;  // on a CPU: how many this rank has waited for
  PartsWaited waited_{}, recorded_{};
  bool recording_ = false;
};

// Copies of host shards, in the dtypes in which compiled code reads weights: so that hosts exchange weights
// once per step, and not for each gather. See [Note: hosts] in context.h, and exchange.h.

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
