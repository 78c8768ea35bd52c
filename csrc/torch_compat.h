// Wraps torch internals that differ between the supported versions, or that torch does not document as
// stable: autograd, the dispatcher, copy-on-write storage and c10d's registries. Check this file first when
// upgrading torch. Other users of internals: cuda/streams.cpp (c10::impl::VirtualGuardImpl),
// gradients/reducer.cpp and weights/user_writes.cpp (TensorImpl, StorageImpl), tensor_ops.cpp
// (at::_foreach_copy_).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace lightning_zero::compat {

// ---- autograd

// Return the id of the backward that runs in this thread; negative outside of one.
int current_backward();
// Return true if the backward computes all gradients, as opposed to torch.autograd.grad() or
// backward(inputs=...).
bool is_full_backward();
enum class Wanted { NO, TO_ACCUMULATE, TO_RETURN };
// Return whether the running backward needs the gradient of `leaf`.
Wanted wanted(const at::Tensor& leaf);
// Call `callback` when the backward ends without an exception. It is destroyed in any case.
void at_end_of_backward(std::function<void()> callback);
// Takes the gradient of a leaf, or an undefined tensor, and returns the gradient for the next hook.
using Hook = std::function<at::Tensor(const at::Tensor&)>;
// Return true if the leaf has hooks other than those of wrap_user_hooks().
bool has_hooks(const at::Tensor& leaf);
// Run `first` before and `last` after all user hooks of the leaf. Idempotent. Autograd calls hooks once per
// backward, after the last gradient of the leaf, even if that is undefined. The leaf owns the hooks, so they
// must not own the leaf.
void wrap_user_hooks(const at::Tensor& leaf, Hook first, Hook last);
// Run all hooks as autograd does for an undefined gradient. Return the result of the last hook.
at::Tensor run_hooks(const at::Tensor& leaf);

// ---- dispatcher

// Call an op by its qualified name. Python may implement it. call_on_tensors() returns the last result, if
// any.
void call(const std::string& op, std::vector<std::string> arguments = {});
at::Tensor call_on_tensors(const std::string& op, std::vector<at::Tensor> arguments);

// ---- copy-on-write storage

// Mark the storage as copy-on-write without a second owner. Any code that may write to it removes the mark.
// Storages with a custom deleter are not marked.
void mark_copy_on_write(const at::Tensor& tensor);
bool is_copy_on_write(const at::Tensor& tensor);

// ---- process groups

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name);
// Return the name of the group's backend for that device; "" without one.
std::string backend_name(c10d::ProcessGroup& group, const c10::Device& device);
// Return true if ranks compare collectives when they start them (TORCH_DISTRIBUTED_DEBUG=DETAIL).
bool compares_collectives();
// Make _c10d_functional::wait_tensor(tensor) wait for `work`.
void register_work(const at::Tensor& tensor, c10::intrusive_ptr<c10d::Work> work);
// Return a barrier of the group's devices on the current stream. It uses signal pads of the symmetric memory
// `memory`. The device traps at the timeout, so that a process whose peers are gone ends. Each stream with
// barriers needs its own `channel`.
std::function<void()> symmetric_barrier(const at::Tensor& memory, const std::string& group_name,
                                        int64_t timeout_ms, int channel);

}  // namespace lightning_zero::compat

namespace lightning_zero {

// Python drops executors under the GIL. The destructor of a process group joins its threads, which take the
// GIL to drop tensors that Python created: without a release, both would wait forever. The C API is looked up
// by name, because this library is built without Python's headers.
//
// Releases the GIL during its lifetime. Does nothing if this thread does not hold it, or without Python.
class WithoutPythonLock {
 public:
  WithoutPythonLock();
  ~WithoutPythonLock();
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* thread_ = nullptr;  // Python's thread state while the GIL is released
};

}  // namespace lightning_zero
