// Ranks that do something together, seen from one of them.
#pragma once

#include <cstdint>

namespace lightning_zero {

struct Ranks {
  int64_t rank = 0, size = 1;
};

}  // namespace lightning_zero
