// Collectives of single tensors, whatever this torch calls them.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace lightning_zero::compat {

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
