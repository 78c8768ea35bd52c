// Moves activations to host memory between forward and backward. lightning_zero/offload/activations.py owns
// the streams, events and memory, and implements the four steps as ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "context.h"

namespace lightning_zero {

class ActivationOffload {
 public:
  explicit ActivationOffload(Context& context) : context_(context) {}

  // Names of the ops that implement the steps.
  struct Ops {
    std::string start_offload, wait_offload, start_reload, wait_reload;
  };
  void set_ops(Ops steps) { ops_ = std::move(steps); }

  // Start a D2H copy of `value` and return it.
  at::Tensor start_offload(const at::Tensor& value);
  // Make the current stream wait for that copy. The device memory of `value` may be reused afterwards.
  void wait_offload(const at::Tensor& value, const at::Tensor& host);
  // Start an H2D copy of `host` and return it.
  at::Tensor start_reload(const at::Tensor& host);
  // Make the current stream wait for that copy. `value` may be read and `host` reused afterwards.
  void wait_reload(const at::Tensor& value, const at::Tensor& host);

 private:
  Context& context_;
  Ops ops_;
};

}  // namespace lightning_zero
