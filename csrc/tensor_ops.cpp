#include "tensor_ops.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace lightning_zero::tensors {

at::Tensor empty(int64_t numel, const at::TensorOptions& options) {
  return at::empty({numel}, options);
}

at::Tensor zeros(int64_t numel, const at::TensorOptions& options) {
  return at::zeros({numel}, options);
}

at::Tensor empty_like(const at::Tensor& tensor) {
  return at::empty_like(tensor);
}

at::Tensor zeros_like(const at::Tensor& tensor) {
  return at::zeros_like(tensor);
}

at::Tensor wrap(void* memory, int64_t numel, const at::TensorOptions& options,
                std::function<void(void*)> on_free) {
  return at::from_blob(memory, {numel}, std::move(on_free), options);
}

at::Tensor scalar(double value) {
  return at::scalar_tensor(value, at::kDouble);
}

at::Tensor numbers(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

bool equal(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a, b);
}

void multiply(at::Tensor to, const at::Tensor& a, const at::Tensor& b) {
  at::mul_out(to, a, b);
}

at::Tensor mean_of_rows(const at::Tensor& rows, at::ScalarType dtype) {
  return at::mean(rows, at::IntArrayRef{0}, /*keepdim=*/false, dtype);
}

void mean_of_rows(at::Tensor to, const at::Tensor& rows, at::ScalarType dtype) {
  at::mean_out(to, rows, at::IntArrayRef{0}, /*keepdim=*/false, dtype);
}

void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  at::_foreach_copy_(to, from);
}

void add_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  at::_foreach_add_(to, from);
}

}  // namespace lightning_zero::tensors
