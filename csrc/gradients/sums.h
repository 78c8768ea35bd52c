// What ranks have sent, on its way into gradient shards: added up in float32, or added up already.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "transport/row_means.h"

namespace lightning_zero {

// Writes to `to`, or adds, what comes of the elements from `begin` on.
using ApplySum = std::function<void(const at::Tensor& to, int64_t begin, bool add)>;

// The mean over rows, one for each rank, taken in float32, of elements from `begin` on. While `mean` lives.
ApplySum make_row_mean(at::Tensor rows, int64_t begin, const RowMeans& mean);
// Of all elements, times `factor`: a reduce-scatter has added them up.
ApplySum make_product(at::Tensor sums, double factor);

}  // namespace lightning_zero
