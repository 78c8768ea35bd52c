// The mean over the rows that ranks sent, in one kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace lightning_zero {

// at::mean over a few long rows takes twice the time of their memory traffic, and delays matrix products,
// which need all SMs at once. Python compiles the kernels in kernels.cu. Without a fitting kernel, at::mean
// is used.
class RowMeans {
 public:
  RowMeans() = default;
  // `code`: the compiled kernels.cu for `rows` rows. Raises if the driver cannot load it.
  RowMeans(const at::Tensor& code, int64_t rows);

  // Write the mean over the rows of `from` to `to`, or add it. `to` has the length of a row. Return false if
  // no kernel fits.
  bool operator()(const at::Tensor& to, const at::Tensor& from, bool add) const;

 private:
  int64_t rows_ = 0;
  std::array<void*, 4> kernels_{};  // for rows in float, half and bfloat16, and bfloat16 to bfloat16
};

}  // namespace lightning_zero
