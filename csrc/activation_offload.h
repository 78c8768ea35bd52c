// Activations that leave for the host's memory between forward and backward. Streams, events and memory are
// Python's: see lightning_zero/offload/activations.py, whose four steps these are.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "context.h"

namespace lightning_zero {

class ActivationOffload {
 public:
  explicit ActivationOffload(Context& context) : context_(context) {}

  // Names of the ops that do it.
  struct Ops {
    std::string start_offload, wait_offload, start_reload, wait_reload;
  };
  void set_ops(Ops steps) { ops_ = std::move(steps); }

  // Starts a copy to the host, and returns it.
  at::Tensor start_offload(const at::Tensor& value);
  // The current stream waits for that: from here on the device's memory may be used for something else.
  void wait_offload(const at::Tensor& value, const at::Tensor& host);
  // Starts a copy back, and returns it.
  at::Tensor start_reload(const at::Tensor& host);
  // The current stream waits for that: the copy may be read, and the host's memory used for something else.
  void wait_reload(const at::Tensor& value, const at::Tensor& host);

 private:
  Context& context_;
  Ops ops_;
};

}  // namespace lightning_zero
