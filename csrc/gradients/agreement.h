// What ranks tell each other at the end of a backward, on the host: no device is read.
#pragma once

#include <utility>
#include <vector>

#include "context.h"
#include "transport/communicator.h"

namespace lightning_zero {

class Agreement {
 public:
  // `control`: null where there is one rank.
  Agreement(Context& context, Communicator* control) : context_(context), control_(control) {}

  struct Agreed {
    std::vector<int64_t> flags;  // the largest of any rank
    bool same_order = true;      // of arrival, on all ranks
  };
  // `flags`: of this rank; as long on every rank. `barriers`: that there were before this backward. Throws
  // where ranks came to them at different times, or have read weights in another order than others.
  Agreed agree(std::vector<int64_t> flags, const std::vector<int64_t>& arrivals, int64_t barriers);

  // Something that the agreements to come carry along; and whether, since the last question, some rank had
  // something to say.
  void say(bool yes) {
    Lock lock(context_.mutex);
    to_say_ = yes;
  }
  bool take_consensus_flag() {
    Lock lock(context_.mutex);
    return std::exchange(said_, false);
  }

 private:
  [[noreturn]] void refuse_order(int64_t mine);

  Context& context_;
  Communicator* control_;
  bool to_say_ = false, said_ = false;
};

}  // namespace lightning_zero
