// Which collectives brought weights in a training step, so that a rank whose backward brings no gradient can
// take part in those that its peers start.
//
// [Note: a rank without gradients] A loss on one rank may reach no weight: its forward is left out, or its
// backward is. Where weights are all-gathered, the peers of that rank wait for it in each all-gather. So each
// rank notes what it gathers up to the end of a backward, and repeats the rest of that before it ends a
// backward without gradients. A step that gathers otherwise than the noted one is found by the agreement at
// the end of the backward, see Agreement::refuse_order().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lightning_zero {

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
  size_t backwards_ = 0;              // backwards in this step
  bool logging_ = false;            // too much has not been noted yet
  std::vector<Entries> previous_;    // by how many backwards had ended in the step
};

}  // namespace lightning_zero
