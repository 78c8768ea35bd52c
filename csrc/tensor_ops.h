// Declares the tensor functions that csrc calls. torch's own declarations need headers that double the
// compile time of nearly every file.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lightning_zero::tensors {

// One-dimensional.
at::Tensor empty(int64_t numel, const at::TensorOptions& options);
at::Tensor zeros(int64_t numel, const at::TensorOptions& options);
at::Tensor empty_like(const at::Tensor& tensor);
at::Tensor zeros_like(const at::Tensor& tensor);
// Wrap foreign memory. `gone` is called when the last tensor on it is destroyed.
at::Tensor wrap(void* memory, int64_t numel, const at::TensorOptions& options,
                std::function<void(void*)> on_free);
// On the CPU, in 64 bits.
at::Tensor scalar(double value);
at::Tensor numbers(const std::vector<int64_t>& values);

bool equal(const at::Tensor& a, const at::Tensor& b);
void multiply(at::Tensor to, const at::Tensor& a, const at::Tensor& b);
// Reduce over dimension 0.
at::Tensor mean_of_rows(const at::Tensor& rows, at::ScalarType dtype);
void mean_of_rows(at::Tensor to, const at::Tensor& rows, at::ScalarType dtype);
// Process tensors pairwise, in one kernel if possible.
void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);
void add_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

}  // namespace lightning_zero::tensors
