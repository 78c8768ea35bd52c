// What differs between the supported versions of torch, and what we use of the insides of autograd, the
// dispatcher, copy-on-write memory and c10d's registries, none of which torch promises to keep. An upgrade of
// torch is checked here first, and then where else something is not torch's public C++ interface:
// runtime/device.cpp (c10::impl::VirtualGuardImpl), parameters.cpp, weights/edits.cpp and
// weights/gathered_table (who holds a TensorImpl or a StorageImpl), weights/compute_copies.cpp
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

// -- autograd

// By which a backward pass that goes on in this thread is known; negative outside of one.
int current_backward();
// Whether it is for all gradients, and not for those of torch.autograd.grad() or backward(inputs=...).
bool is_full_backward();
enum class Wanted { NO, TO_ACCUMULATE, TO_RETURN };
// Whether it is after the gradient of `leaf`.
Wanted wanted(const at::Tensor& leaf);
// Called when it ends without an exception; destroyed in any case.
void at_end_of_backward(std::function<void()> callback);
// Takes the gradient of a leaf, undefined if there is none, and returns the one that the next hook gets.
using Hook = std::function<at::Tensor(const at::Tensor&)>;
// Return true if the leaf has hooks besides those of surround_hooks().
bool has_hooks(const at::Tensor& leaf);
// Runs `first` before all other hooks of the leaf, and `last` after them, if there are others. Harmless when
// repeated. Autograd calls hooks once per backward, after the last gradient of the leaf, even an undefined
// one. The leaf owns them, so they must not own the leaf.
void surround_hooks(const at::Tensor& leaf, Hook first, Hook last);
// Runs all of them as autograd does for an undefined gradient. Returns what the last one does.
at::Tensor run_hooks(const at::Tensor& leaf);

// -- the dispatcher

// An op by its qualified name, which Python may have implemented: of strings; and of tensors, with what it
// returns last, if it does.
void call(const std::string& op, std::vector<std::string> arguments = {});
at::Tensor call_on_tensors(const std::string& op, std::vector<at::Tensor> arguments);

// -- memory that is copied when it is written to

// Marks memory as shared with nobody: whoever may write to it takes the mark away. Memory of another make is
// not marked.
void mark(const at::Tensor& tensor);
bool is_marked(const at::Tensor& tensor);

// -- process groups

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name);
// By which the group's collectives on that device go; "" where it has none.
std::string backend_name(c10d::ProcessGroup& group, const c10::Device& device);
// Whether ranks compare collectives with each other as they start them (TORCH_DISTRIBUTED_DEBUG=DETAIL).
bool compares_collectives();
// Makes _c10d_functional::wait_tensor(tensor) wait for it.
void register_work(const at::Tensor& tensor, c10::intrusive_ptr<c10d::Work> work);
// A barrier of that group's devices, by signals in symmetric memory, which `memory` is; on the current
// stream. The device traps at the timeout, so that a process whose peers are gone ends. `channel`: of the
// signals; one for each stream on which there are barriers.
std::function<void()> symmetric_barrier(const at::Tensor& memory, const std::string& group_name,
                                        int64_t timeout_ms, int channel);

}  // namespace lightning_zero::compat
