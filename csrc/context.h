// State that all parts of an executor share: options, ranks, parameter records, the lock.
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

// A set of ranks, as one of them sees it.
struct Ranks {
  int64_t rank = 0, size = 1;
};

struct ExecutorOptions {
  int64_t bucket_bytes = 64 << 20;
  bool double_buffer = true;
  bool free_buckets = false;  // return bucket memory to the allocator after each backward
  bool sync_collectives = false;
  bool nan_fill = false;  // fills bucket and weight memory with NaN, see Communicator::set_nan_fill
  std::optional<at::ScalarType> reduce_dtype;  // of gradients in collectives; empty: the parameter's dtype
  // Bytes of full weights in one part of a host exchange. The first parts are smaller.
  int64_t exchange_part_bytes = 128 << 20;
};

// [Note: hosts] With several hosts, each parameter has as many shards as there are ranks. Consecutive shards
// are on ranks with the same local rank: shard 0 on local rank 0 of host 0, shard 1 on local rank 0 of host
// 1, and so on. The shards of one local rank on all hosts are contiguous and form a host shard. The host
// shards of one host's ranks, in order, form the full parameter. Weights are all-gathered in two steps,
// across hosts into host shards and inside a host into full weights. Gradients are reduced inside a host
// first and then across hosts. No step has to reorder data.
//
// If each host holds a replica (HSDP), a parameter has as many shards as a host has ranks and the host shard
// is the shard. Weights do not cross hosts, and gradients are all-reduced across hosts. Optimizer steps are
// then bitwise equal on all hosts, so their inputs must not depend on rank order within a host.
struct Context {
  explicit Context(const std::string& device_name) : device(device_name) {}

  c10::Device device;
  int64_t rank = 0, size = 1;
  Ranks intra_host, inter_host;  // ranks of this host; ranks with this local rank on all hosts
  bool replicated = false;       // each host holds a full replica
  ExecutorOptions options;
  c10::intrusive_ptr<Watchdog> watchdog;
  std::vector<std::unique_ptr<ParamRecord>> records;
  int64_t shard_version = 0;  // increases whenever shards may have changed
  // Hash of the order in which eager code all-gathered weights since the last comparison. Reading different
  // weights of equal size on different ranks would otherwise be silent.
  uint64_t eager_read_hash = 0;
  // Number of reads of compute shards that held a gradient or could receive one at any time.
  int64_t reads_of_gradients = 0;
  int64_t user_write_count = 0;  // increases when something other than an optimizer announces a shard change
  std::map<std::string, int64_t> counters;
  // Guards the state of all parts. Every method that Python, an op or an autograd thread calls holds it.
  mutable std::recursive_mutex mutex;

  // Return the number of shards per host shard, and per parameter.
  int64_t shards_of_host_shard() const { return replicated ? 1 : inter_host.size; }
  int64_t shards() const { return intra_host.size * shards_of_host_shard(); }
  // Return the index of this rank's shard in each parameter.
  int64_t shard_number() const {
    return replicated ? intra_host.rank : intra_host.rank * inter_host.size + inter_host.rank;
  }
  bool has_hosts() const { return inter_host.size > 1; }
  bool exchanges_weights() const { return has_hosts() && !replicated; }
  ParamRecord& at(int64_t index) const { return *records.at(static_cast<size_t>(index)); }
  void count(const char* what, int64_t by = 1) { counters[what] += by; }
  void record_read(int64_t index) {
    eager_read_hash = (eager_read_hash ^ static_cast<uint64_t>(index + 1)) * 0x100000001b3;  // FNV-1a
  }
  void set_last_parameter(const ParamRecord& record) const {
    if (watchdog)
      watchdog->activity().set_last_parameter(record.name);
  }
};

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace lightning_zero
