// Memory for whole weights, and the way in which they come there.
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
  // `transports`: the best first; the last can gather everything.
  Gatherer(Context& context, std::vector<std::unique_ptr<GatherTransport>> transports)
      : context_(context), transports_(std::move(transports)) {}

  // With the padding of all ranks' shards.
  int64_t full_numel(const ParamRecord& record) const { return context_.shards() * record.shard_numel(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  // One weight, wherever it is read, into `output`, or memory of its own where that is undefined. `sources`
  // must live until it is there.
  Pending gather(ParamRecord& record, at::ScalarType dtype, at::Tensor& output,
                 std::vector<at::Tensor>& sources);

  // Starts to bring whole weights into `outputs`, for compiled code. `sources`: likewise.
  Pending gather_group(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                       std::vector<at::Tensor>& sources);

  // Whether a group could be gathered by this rank alone before it is asked for.
  bool is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const;

  // One weight without any other rank, unless that is impossible: whether it is there.
  bool gather_alone(ParamRecord& record, const at::Tensor& output);

 private:
  GatherTransport& transport_for(const std::vector<ParamRecord*>& records,
                                 const std::vector<at::Tensor>& outputs, bool grouped) const;

  Context& context_;
  std::vector<std::unique_ptr<GatherTransport>> transports_;
};

// What a training step's compiled code gathers first is fetched as the step begins, before Dynamo has checked
// its guards.

// Weights that are fetched in one launch into one tensor: weight i, padded, behind weight i - 1.
struct GatherGroup {
  std::vector<ParamRecord*> records;
  at::ScalarType dtype;
  int64_t numel;
  bool operator==(const GatherGroup&) const = default;
};

// Such a fetch that has begun. `sources` must live until it has arrived.
struct PendingGroup {
  GatherGroup group;
  at::Tensor buffer;
  Pending pending;
};
PendingGroup start_gather(Gatherer& gatherer, GatherGroup group, std::vector<at::Tensor>& sources);

class GroupPrefetcher {
 public:
  GroupPrefetcher(Context& context, Gatherer& gatherer) : context_(context), gatherer_(gatherer) {}

  // A training step begins: fetches what the last one's graph fetched first. `noting`: and watches what this
  // one's does.
  void begin_step(bool recording);
  // Another compiled graph begins: only one graph's groups are noted.
  void begin_graph() { recording_ = recording_ && recorded_.empty(); }
  // The group, if it has been on its way since the step began; otherwise undefined.
  at::Tensor take(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel);
  // What is on its way is of values that change, or is not wanted.
  void drop();
  void forget();

 private:
  Context& context_;
  Gatherer& gatherer_;
  std::vector<GatherGroup> recorded_;  // as the last step showed
  bool recording_ = false;
  std::deque<PendingGroup> pending_;
};

// Which collectives brought weights in a training step, so that a rank whose backward brings no gradient can
// take part in those that its peers start.
//
// [Note: a rank without gradients] A loss on one rank may reach no weight: its forward is left out, or its
// backward is. Where weights are all-gathered, the peers of that rank wait for it in each all-gather. So each
// rank notes what it gathers up to the end of a backward, and repeats the rest of that before it ends a
// backward without gradients. A step that gathers otherwise than the noted one is found by the agreement at
// the end of the backward, see Agreement::refuse_order().

class GatherLog {
 public:
  enum class Kind { EAGER, SINGLE, GROUP, RESIDENT, GRAPH };
  // GRAPH: a compiled graph begins, where peers may have to be waited for. `numel`: of a group.
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
  // Number of the next entry; and the entries from that number on, which are taken out.
  size_t size() const { return current_.size(); }
  Entries take_from(size_t begin);
  void append(const Entries& entries);

  // A backward has brought gradients.
  void end_backward();
  // A backward without gradients ends: what this rank has not gathered of what it gathered up to there in the
  // last step with gradients. Nothing if it has gathered something else.
  Entries missing() const;
  void end_skipped();

 private:
  Entries current_;
  size_t backwards_ = 0;           // backwards in this step
  bool logging_ = false;           // too much has not been noted yet
  std::vector<Entries> previous_;  // by how many backwards had ended in the step
};

}  // namespace lightning_zero
