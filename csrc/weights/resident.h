// Weights that stay whole in memory of their own until the optimizer steps.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "context.h"
#include "weights/access.h"
#include "weights/gatherer.h"

namespace lightning_zero {

class ResidentWeights {
 public:
  ResidentWeights(Context& context, Access& access, Gatherer& gatherer)
      : context_(context), access_(access), gatherer_(gatherer) {}

  // For compiled code: gathers them into their memory, `resident`, unless they are there.
  void start(at::TensorList resident, at::TensorList shards);
  void wait(at::TensorList shards);
  // For code that is not compiled, as long as it may (`serve`): a copy into `flat`, which is made where it is
  // undefined, of one that stays in this dtype; gathers that first, unless it is there. Whether it has done
  // so.
  bool read(ParamRecord& record, at::ScalarType dtype, at::Tensor& flat);
  void serve(bool on);
  // Eager code has edited a weight that it was given.
  void edit(ParamRecord& record, const at::Tensor& flat) const;
  bool any_arriving() const { return !arriving_.empty(); }
  void close() { arriving_.clear(); }

  // -- see [Note: captured graphs]
  // By index: weights that a recorded graph gathers; and those that must be there already.
  struct Recorded {
    std::vector<int64_t> gathered, found;
  };
  void begin_recording() { recording_.emplace(); }
  // What was recorded has only been captured: what it was to leave behind is not there.
  Recorded end_recording();
  void mark_not_run(const Recorded& graph);
  // Whether a replay finds what it needs, where `gathered` has been gathered before; its own is added to
  // that.
  bool finds_all(const Recorded& graph, std::set<int64_t>& gathered) const;
  void after_replay(const Recorded& graph);

 private:
  // A host shard has come with the others', see Access::let_read(); to be gathered again is for eager code,
  // which may find it stale.
  bool is_filled(ParamRecord& record) const;
  void note_filled(ParamRecord& record) const;
  void wait_for(int64_t index, bool compiled);

  Context& context_;
  Access& access_;
  Gatherer& gatherer_;
  // Gathers into resident memory that have not been waited for, by parameter.
  struct Arriving {
    Pending pending;
    std::vector<at::Tensor> sources;
  };
  std::unordered_map<int64_t, std::shared_ptr<Arriving>> arriving_;
  std::optional<Recorded> recording_;
  bool serves_ = false;
};

}  // namespace lightning_zero
