#include "transport/row_means.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "cuda/cuda_api.h"
#include "cuda/streams.h"

namespace lightning_zero {

namespace {

constexpr unsigned kMeanThreads = 256;  // as in kernels.cu
constexpr int64_t kBlocks = 1 << 16;    // more than run at once; a thread has one or two packs
constexpr int64_t kPack = 16;           // bytes

bool aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPack == 0;
}

}  // namespace

RowMeans::RowMeans(const at::Tensor& code, int64_t rows) : rows_(rows) {
  const auto& driver = CudaDriver::instance();
  void* module = driver.load_module(code.const_data_ptr());
  size_t index = 0;
  for (const char* name :
       {"mean_of_float", "mean_of_half", "mean_of_bfloat16", "mean_of_bfloat16_in_bfloat16"})
    kernels_[index++] = driver.find_kernel(module, name);
}

bool RowMeans::operator()(const at::Tensor& to, const at::Tensor& from, bool add) const {
  const auto dtype = from.scalar_type();
  void* kernel = dtype == at::kFloat      ? kernels_[0]
                 : dtype == at::kHalf     ? kernels_[1]
                 : dtype == at::kBFloat16 ? kernels_[2]
                                          : nullptr;
  if (dtype == at::kBFloat16 && to.scalar_type() == at::kBFloat16)
    kernel = kernels_[3];
  else if (to.scalar_type() != at::kFloat)
    return false;
  if (kernel == nullptr || from.size(0) != rows_)
    return false;
  TORCH_INTERNAL_ASSERT(to.is_contiguous() && from.stride(1) == 1 && from.size(1) == to.numel());
  auto* target = to.mutable_data_ptr();
  const auto* source = from.const_data_ptr();
  long long stride = from.stride(0), n = to.numel(), packs = 0;
  const auto item = static_cast<int64_t>(from.element_size());
  if (aligned(target) && aligned(source) && stride * item % kPack == 0)
    packs = n * item / kPack;
  int adds = add;
  void* arguments[] = {&target, &source, &stride, &n, &packs, &adds};
  const auto wanted = (std::max<int64_t>(packs, n - packs * kPack / item) + kMeanThreads - 1) / kMeanThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kBlocks));
  CudaDriver::instance().launch(kernel, blocks, kMeanThreads, current_stream(to.device()), arguments);
  return true;
}

}  // namespace lightning_zero
