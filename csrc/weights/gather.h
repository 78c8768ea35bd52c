// Gathers weights: allocates their memory, selects a transport, prefetches the first groups of a step, and
// logs gathers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "context.h"
#include "transport/transport.h"

namespace lightning_zero {

class Gatherer {
 public:
  // `transports`: in order of preference; the last one can gather everything.
  Gatherer(Context& context, std::vector<std::unique_ptr<GatherTransport>> transports)
      : context_(context), transports_(std::move(transports)) {}

  // Return the size of the full weight with the padding of all shards.
  int64_t full_numel(const ParamRecord& record) const { return context_.shards() * record.shard_numel(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  // Gather one weight, at any point of the program, into `output`, which is allocated if undefined. `sources`
  // must live until the gather has completed.
  Pending gather(ParamRecord& record, at::ScalarType dtype, at::Tensor& output,
                 std::vector<at::Tensor>& sources);

  // Gather weights for compiled code into `outputs`. `sources` must live until the gather has completed.
  Pending gather_group(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                       std::vector<at::Tensor>& sources);

  // Return true if this rank alone could gather the group before it is requested.
  bool is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const;

  // Gather one weight without other ranks. Return false if no transport can.
  bool gather_alone(ParamRecord& record, const at::Tensor& output);

 private:
  GatherTransport& transport_for(const std::vector<ParamRecord*>& records,
                                 const std::vector<at::Tensor>& outputs, bool grouped) const;

  Context& context_;
  std::vector<std::unique_ptr<GatherTransport>> transports_;
};

// Weights that are gathered in one launch into one tensor, one after the other, each padded.
struct GatherGroup {
  std::vector<ParamRecord*> records;
  at::ScalarType dtype;
  int64_t numel;
  bool operator==(const GatherGroup&) const = default;
};

// A gather of a group that has begun. `sources` must live until it has completed.
struct PendingGroup {
  GatherGroup group;
  at::Tensor buffer;
  Pending pending;
};
PendingGroup start_gather(Gatherer& gatherer, GatherGroup group, std::vector<at::Tensor>& sources);

// Prefetches the groups that a training step gathers first, as the step begins and before Dynamo has checked
// its guards.
class GroupPrefetcher {
 public:
  GroupPrefetcher(Context& context, Gatherer& gatherer) : context_(context), gatherer_(gatherer) {}

  // Begin a training step: gather the groups that the previous step gathered first. `recording`: record those
  // of this step.
  void begin_step(bool recording);
  // Only the groups of one graph per step are recorded.
  void begin_graph() { recording_ = recording_ && recorded_.empty(); }
  // Return the group's buffer if it was prefetched; otherwise an undefined tensor.
  at::Tensor take(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel);
  // Drop prefetched groups, whose values change or which the step does not need.
  void drop();
  void forget();

 private:
  Context& context_;
  Gatherer& gatherer_;
  std::vector<GatherGroup> recorded_;  // groups of the previous step
  bool recording_ = false;
  std::deque<PendingGroup> pending_;
};

// Logs the collectives that gather weights in a training step, so that a rank whose backward brings no
// gradients can join those of its peers.
//
// [Note: a rank without gradients] The loss of one rank may not depend on any weight, or its backward may be
// left out. If weights are all-gathered, its peers wait for it in every all-gather. So each rank logs its
// gathers up to the end of a backward, and repeats the missing ones before it ends a backward without
// gradients. If a step gathers other weights than the logged step, the consensus at the end of the backward
// detects it, see RankConsensus::raise_order_mismatch().
class GatherLog {
 public:
  enum class Kind { EAGER, SINGLE, GROUP, CACHED, GRAPH };
  // GRAPH: the beginning of a compiled graph, which may wait for peers. `numel`: size of a group.
  struct Entry {
    Kind kind = Kind::GRAPH;
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> indices;  // of parameters
    int64_t numel = 0;
    bool operator==(const Entry&) const = default;
  };
  using Entries = std::vector<Entry>;

  void begin_step();
  void note(Entry entry);
  // Return the number of entries; remove and return the entries from `begin` on.
  size_t size() const { return current_.size(); }
  Entries take_from(size_t begin);
  void append(const Entries& entries);

  // End a backward that brought gradients.
  void end_backward();
  // For a backward without gradients: return the gathers that the previous step with gradients logged up to
  // here and that this rank has not started. Empty if this step has gathered something else.
  Entries missing() const;
  void end_skipped();

 private:
  Entries current_;
  size_t backwards_ = 0;           // number of backwards that ended in this step
  bool logging_ = false;           // false after the log has exceeded its limit
  std::vector<Entries> previous_;  // by the number of backwards that had ended before
};

}  // namespace lightning_zero
