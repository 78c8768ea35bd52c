// Ranks that do something together, seen from one of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "watchdog/watchdog.h"
#include "weights/param_registry.h"

namespace lightning_zero {

struct Ranks {
  int64_t rank = 0, size = 1;
};

// What the owners of an executor's state have in common.

struct ExecutorOptions {
  int64_t bucket_bytes = 64 << 20;
  bool double_buffer = true;
  bool free_buckets = false;  // give bucket memory back at the end of each backward
  bool sync_collectives = false;
  bool nan_fill = false;  // see Communicator::poison; and memory of weights and buckets is NaN when it is
                          // handed out or given back
  std::optional<at::ScalarType> reduce_dtype;  // on the wire; the parameter's own when empty
  // Of whole weights in a part of what hosts exchange, but for the first ones, which are smaller.
  int64_t exchange_part_bytes = 128 << 20;
};

// [Note: hosts] Where ranks run on several hosts, each parameter is cut into as many shards as there are
// ranks, and neighbouring shards lie at one place of all hosts: on rank 0 of the first host, on rank 0 of the
// second, ..., on rank 1 of the first, ... So what ranks at one place of all hosts have together is one piece
// of the parameter, its host shard, and the host shards of a host's ranks, in their order, are the parameter.
// Weights are gathered in two steps, across hosts into host shards, and inside a host into whole ones;
// gradients are reduced in two, inside and then across. Each step is one collective, or copies, that nothing
// has to be sorted for.
//
// Where each host holds a replica of everything, a parameter is cut into as many shards as a host has ranks,
// the host shard is the shard, and weights do not cross hosts: gradients that a host has reduced are
// all-reduced. Optimizers then do the same on each host, to the bit; whatever goes into that must not depend
// on the order in which ranks of a host come.
struct Context {
  explicit Context(const std::string& device_name) : device(device_name) {}

  c10::Device device;
  int64_t rank = 0, size = 1;
  Ranks intra_host, inter_host;  // the ranks of this rank's host; and those at its place of each host
  bool replicated = false;       // each host holds all of every parameter
  ExecutorOptions options;
  c10::intrusive_ptr<Watchdog> watchdog;
  std::vector<std::unique_ptr<ParamRecord>> records;
  int64_t shard_version = 0;  // changes when shards may have
  // Tells apart in which order code that is not compiled has gathered weights by collectives, since ranks
  // compared it last: to read others than the rest goes unnoticed where they are of one size.
  uint64_t eager_read_hash = 0;
  int64_t user_write_count = 0;  // changes when somebody who is no optimizer has said that he changes shards
  std::map<std::string, int64_t> counters;
  // Of all owners' state, and held by each of their methods that others than the owners call: what is called
  // from Python, from ops, and from autograd's threads.
  mutable std::recursive_mutex mutex;

  // How many shards make a host shard, and how many a parameter.
  int64_t shards_of_host_shard() const { return replicated ? 1 : inter_host.size; }
  int64_t shards() const { return intra_host.size * shards_of_host_shard(); }
  // Which shard of each parameter lies on this rank.
  int64_t shard_number() const {
    return replicated ? intra_host.rank : intra_host.rank * inter_host.size + inter_host.rank;
  }
  bool has_hosts() const { return inter_host.size > 1; }
  bool exchanges_weights() const { return has_hosts() && !replicated; }
  ParamRecord& at(int64_t index) const { return *records.at(static_cast<size_t>(index)); }
  void count(const char* what, int64_t by = 1) { counters[what] += by; }
  void record_read(int64_t index) {
    eager_read_hash = (eager_read_hash ^ static_cast<uint64_t>(index + 1)) * 0x100000001b3;  // as FNV does
  }
  void set_last_parameter(const ParamRecord& record) const {
    if (watchdog)
      watchdog->activity().set_last_parameter(record.name);
  }
};

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace lightning_zero
