// What differs between the supported versions of torch, and what we use of the insides of autograd, the
// dispatcher, copy-on-write memory and c10d's registries, none of which torch promises to keep. An upgrade of
// torch is checked here first, and then where else something is not torch's public C++ interface:
// runtime/device.cpp (c10::impl::VirtualGuardImpl), parameters.cpp, weights/edits.cpp and
// weights/gathered_table (who holds a TensorImpl or a StorageImpl), weights/compute_copies.cpp
// (at::_foreach_copy_).
#pragma once

#include <ATen/core/stack.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <vector>

namespace lightning_zero::compat {

// -- autograd

// By which a backward pass that goes on in this thread is known; negative outside of one.
int current_backward();
// Whether it is for all gradients, and not for those of torch.autograd.grad() or backward(inputs=...).
bool is_whole_backward();
enum class Wanted { NO, TO_ACCUMULATE, TO_RETURN };
// Whether it is after the gradient of `leaf`.
Wanted wanted(const at::Tensor& leaf);
// Called when it ends without an exception; destroyed in any case.
void at_end_of_backward(std::function<void()> callback);

// -- the dispatcher

// An op by its qualified name, which Python may have implemented.
void call(const std::string& op, torch::jit::Stack stack = {});

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

// torch 2.13 renamed the single-tensor collectives of c10d::ProcessGroup and deprecated the old names;
// torch 2.11 has only the old ones. Detecting the member keeps version numbers out of the code.

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <class Group>
auto all_gather(Group& group, at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options,
                int) -> decltype(group.all_gather_single(output, input, options)) {
  return group.all_gather_single(output, input, options);
}

template <class Group>
WorkPtr all_gather(Group& group, at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options,
                   long) {
  return group._allgather_base(output, input, options);
}

template <class Group>
auto reduce_scatter(Group& group, at::Tensor& output, at::Tensor& input,
                    const c10d::ReduceScatterOptions& options, int)
    -> decltype(group.reduce_scatter_single(output, input, options)) {
  return group.reduce_scatter_single(output, input, options);
}

template <class Group>
WorkPtr reduce_scatter(Group& group, at::Tensor& output, at::Tensor& input,
                       const c10d::ReduceScatterOptions& options, long) {
  return group._reduce_scatter_base(output, input, options);
}

// Several of them in one launch.

template <class Group>
auto all_gather_several(Group& group, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                        const c10d::AllgatherOptions& options, int)
    -> decltype(group.all_gather_single_coalesced(outputs, inputs, options)) {
  return group.all_gather_single_coalesced(outputs, inputs, options);
}

template <class Group>
WorkPtr all_gather_several(Group& group, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                           const c10d::AllgatherOptions& options, long) {
  return group.allgather_into_tensor_coalesced(outputs, inputs, options);
}

template <class Group>
auto reduce_scatter_several(Group& group, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                            const c10d::ReduceScatterOptions& options, int)
    -> decltype(group.reduce_scatter_single_coalesced(outputs, inputs, options)) {
  return group.reduce_scatter_single_coalesced(outputs, inputs, options);
}

template <class Group>
WorkPtr reduce_scatter_several(Group& group, std::vector<at::Tensor>& outputs,
                               std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options,
                               long) {
  return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

}  // namespace lightning_zero::compat
