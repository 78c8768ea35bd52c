// What the owners of an executor's state have in common.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "param_registry.h"
#include "runtime/watchdog.h"

namespace lightning_zero {

struct ExecutorOptions {
  int64_t bucket_bytes = 64 << 20;
  bool double_buffer = true;
  bool free_buckets = false;  // give bucket memory back at the end of each backward
  bool sync_collectives = false;
  bool poison = false;  // see Communicator::poison; and memory of weights and buckets is NaN when it is
                        // handed out or given back
  std::optional<at::ScalarType> reduce_dtype;  // on the wire; the parameter's own when empty
};

struct Context {
  explicit Context(const std::string& device_name) : device(device_name) {}

  c10::Device device;
  int64_t rank = 0, size = 1;
  ExecutorOptions options;
  c10::intrusive_ptr<Watchdog> watchdog;
  std::vector<std::unique_ptr<ParamRecord>> records;
  int64_t epoch = 0;  // changes when shards may have
  std::map<std::string, int64_t> counters;
  // Of all owners' state, and held by each of their methods that others than the owners call: what is called
  // from Python, from ops, and from autograd's threads.
  mutable std::recursive_mutex mutex;

  ParamRecord& at(int64_t index) const { return *records.at(static_cast<size_t>(index)); }
  void count(const char* what, int64_t by = 1) { counters[what] += by; }
  void touch(const ParamRecord& record) const {
    if (watchdog)
      watchdog->activity().touch(record.name);
  }
};

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace lightning_zero
