// Copies between memory that ranks share: where whole weights come from, and where gradients go.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

namespace lightning_zero {

// `bytes` of one tensor's storage to another's.
// Addresses, not tensors: a step has thousands, and making a view takes as long as everything else about
// them.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  const void *to_storage, *from_storage;
  int stream = 0;  // in a graph: those of other lanes go on beside it
};

// Queues copies on `stream`, which must be the current one, in any order: one call of the driver for all of
// them where it has such a call, since on the host each takes longer than a small transfer does.
// `side_streams`: for the lanes beyond the first, when this is recorded into a graph, which has no place for
// that call.
void enqueue_copies(const std::vector<Copy>& copies, const c10::Stream& stream,
              const std::vector<c10::Stream>& side_streams);

}  // namespace lightning_zero
