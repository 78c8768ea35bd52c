#include "activations.h"

#include "runtime/compat.h"

namespace lightning_zero {

// None of these holds the lock while Python runs, whose own lock another thread may have that waits for ours.

at::Tensor Activations::leave(const at::Tensor& value) {
  auto host = compat::call_on_tensors(steps_.leave, {value});
  Lock lock(context_.mutex);
  context_.count("offloaded_activations");
  context_.count("offload_bytes", static_cast<int64_t>(value.nbytes()));
  return host;
}

void Activations::left(const at::Tensor& value, const at::Tensor& host) {
  compat::call_on_tensors(steps_.left, {value, host});
}

at::Tensor Activations::come(const at::Tensor& host) {
  auto value = compat::call_on_tensors(steps_.come, {host});
  Lock lock(context_.mutex);
  context_.count("reload_bytes", static_cast<int64_t>(host.nbytes()));
  return value;
}

void Activations::came(const at::Tensor& value, const at::Tensor& host) {
  compat::call_on_tensors(steps_.came, {value, host});
}

}  // namespace lightning_zero
