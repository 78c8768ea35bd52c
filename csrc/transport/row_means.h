// The mean over what ranks sent, in one kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace lightning_zero {

// at::mean over a few long rows takes twice as long as their bytes need, and matrix products, which need all
// multiprocessors at once, wait for it: 2 ms of an 80 ms step. Python compiles the kernels of row_means.cu;
// without them, and where they do not fit, at::mean is what runs.
class RowMeans {
 public:
  RowMeans() = default;
  // `code`: bytes that the device's driver loads, of kernels for so many rows. Raises if it does not.
  RowMeans(const at::Tensor& code, int64_t rows);

  // Writes, or adds, the mean over the rows of `from` to `to`, as long as a row. False: no kernel fits.
  bool operator()(const at::Tensor& to, const at::Tensor& from, bool add) const;

 private:
  int64_t rows_ = 0;
  std::array<void*, 4> kernels_{};  // of rows in float, half, bfloat16; of those into bfloat16
};

}  // namespace lightning_zero
