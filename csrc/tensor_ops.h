// The functions on tensors that this library calls, by declarations of our own: torch's come with headers
// that take a compiler twice as long as those of a tensor, and nearly every file needs one of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lightning_zero::tensors {

// 1-D.
at::Tensor empty(int64_t numel, const at::TensorOptions& options);
at::Tensor zeros(int64_t numel, const at::TensorOptions& options);
at::Tensor empty_like(const at::Tensor& tensor);
at::Tensor zeros_like(const at::Tensor& tensor);
// Memory of somebody else's, who is told when nobody reads it any more.
at::Tensor wrap(void* memory, int64_t numel, const at::TensorOptions& options,
                std::function<void(void*)> gone);
// On the host, in 64 bits.
at::Tensor scalar(double value);
at::Tensor numbers(const std::vector<int64_t>& values);

bool equal(const at::Tensor& a, const at::Tensor& b);
void multiply(at::Tensor to, const at::Tensor& a, const at::Tensor& b);
// Over the first dimension.
at::Tensor mean_of_rows(const at::Tensor& pads, at::ScalarType dtype);
void mean_of_rows(at::Tensor to, const at::Tensor& pads, at::ScalarType dtype);
// Each to its own, in one kernel where that is possible.
void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);
void add_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

}  // namespace lightning_zero::tensors
