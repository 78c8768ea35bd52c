#include "activation_offload.h"

#include "torch_compat.h"

namespace lightning_zero {

// Do not hold the lock while Python runs: another thread may hold the GIL and wait for this lock.

at::Tensor ActivationOffload::start_offload(const at::Tensor& value) {
  auto host = compat::call_on_tensors(ops_.start_offload, {value});
  Lock lock(context_.mutex);
  context_.count("offloaded_activations");
  context_.count("offload_bytes", static_cast<int64_t>(value.nbytes()));
  return host;
}

void ActivationOffload::wait_offload(const at::Tensor& value, const at::Tensor& host) {
  compat::call_on_tensors(ops_.wait_offload, {value, host});
}

at::Tensor ActivationOffload::start_reload(const at::Tensor& host) {
  auto value = compat::call_on_tensors(ops_.start_reload, {host});
  Lock lock(context_.mutex);
  context_.count("reload_bytes", static_cast<int64_t>(host.nbytes()));
  return value;
}

void ActivationOffload::wait_reload(const at::Tensor& value, const at::Tensor& host) {
  compat::call_on_tensors(ops_.wait_reload, {value, host});
}

}  // namespace lightning_zero
