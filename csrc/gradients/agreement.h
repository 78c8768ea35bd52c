// What ranks tell each other at the end of a backward, on the host: no device is read.
#pragma once

#include <utility>
#include <vector>

#include "context.h"
#include "transport/communicator.h"

namespace lightning_zero {

class RankConsensus {
 public:
  // `control`: null where there is one rank.
  RankConsensus(Context& context, Communicator* control) : context_(context), control_(control) {}

  struct Result {
    std::vector<int64_t> flags;  // the largest of any rank
    bool same_order = true;      // of arrival, on all ranks
  };
  // `flags`: of this rank; as long on every rank. `barriers`: that there were before this backward. Throws
  // where ranks came to them at different times, or have read weights in another order than others.
  Result agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals, int64_t barriers);

  // Something that the agreements to come carry along; and whether, since the last question, some rank had
  // something to say.
  void set_flag(bool yes) {
    Lock lock(context_.mutex);
    flag_ = yes;
  }
  bool take_flag() {
    Lock lock(context_.mutex);
    return std::exchange(any_flag_, false);
  }

 private:
  [[noreturn]] void raise_order_mismatch(int64_t mine);

  Context& context_;
  Communicator* control_;
  bool flag_ = false, any_flag_ = false;
};

}  // namespace lightning_zero
