// Activations that leave for the host's memory between forward and backward. Streams, events and memory are
// Python's: see lightning_zero/offload/activations.py, whose four steps these are.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "context.h"

namespace lightning_zero {

class Activations {
 public:
  explicit Activations(Context& context) : context_(context) {}

  // Names of the ops that do it.
  struct Steps {
    std::string leave, left, come, came;
  };
  void keep(Steps steps) { steps_ = std::move(steps); }

  // Starts a copy to the host, and returns it.
  at::Tensor leave(const at::Tensor& value);
  // The current stream waits for that: from here on the device's memory may be used for something else.
  void left(const at::Tensor& value, const at::Tensor& host);
  // Starts a copy back, and returns it.
  at::Tensor come(const at::Tensor& host);
  // The current stream waits for that: the copy may be read, and the host's memory used for something else.
  void came(const at::Tensor& value, const at::Tensor& host);

 private:
  Context& context_;
  Steps steps_;
};

}  // namespace lightning_zero
