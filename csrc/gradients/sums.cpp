#include "gradients/sums.h"

#include <cmath>

#include "runtime/tensors.h"

namespace lightning_zero {

namespace {

void add_mean(at::Tensor to, const at::Tensor& rows, bool add, const RowMeans& mean) {
  if (mean(to, rows, add))
    return;
  const auto wide = c10::promoteTypes(to.scalar_type(), at::kFloat);
  if (!add && to.scalar_type() == wide)
    return tensors::mean_of_rows(to, rows, wide);
  const auto from = tensors::mean_of_rows(rows, wide);
  add ? to.add_(from) : to.copy_(from);
}

void add_product(at::Tensor to, const at::Tensor& from, double factor, bool add) {
  int exponent = 0;
  if (factor == 1.0) {
    add ? to.add_(from) : to.copy_(from);
  } else if (std::frexp(factor, &exponent) == 0.5) {
    // In one kernel: it rounds to a narrow dtype, which loses nothing of a half or a quarter.
    if (add)
      to.add_(from, factor);
    else
      tensors::multiply(to, from, tensors::scalar(factor));
  } else {
    const auto wide = c10::promoteTypes(to.scalar_type(), at::kFloat);
    const bool there = !add && to.scalar_type() == wide;
    auto product = there ? to : tensors::empty(to.numel(), to.options().dtype(wide));
    tensors::multiply(product, product.copy_(from), tensors::scalar(factor));
    if (!there)
      add ? to.add_(product) : to.copy_(product);
  }
}

}  // namespace

ApplySum make_row_mean(at::Tensor rows, int64_t begin, const RowMeans& mean) {
  return [rows = std::move(rows), begin, &mean](const at::Tensor& to, int64_t from, bool add) {
    add_mean(to, rows.narrow(1, from - begin, to.numel()), add, mean);
  };
}

ApplySum make_product(at::Tensor sums, double factor) {
  return [sums = std::move(sums), factor](const at::Tensor& to, int64_t begin, bool add) {
    add_product(to, piece(sums, begin, to.numel()), factor, add);
  };
}

}  // namespace lightning_zero
