#include "means.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>

#include "device.h"

namespace lightning_zero {

namespace {

constexpr int kThreads = 256;         // as in means.cu
constexpr int64_t kBlocks = 1 << 16;  // more than run at once; each thread has a pack or two
constexpr int64_t kPack = 16;         // bytes

// The driver's functions, from the library that torch has loaded, so that no CUDA is needed to build this.
struct Driver {
  int (*load)(void** module, const void* image) = nullptr;
  int (*find)(void** kernel, void* module, const char* name) = nullptr;
  int (*launch)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                void* stream, void** arguments, void** extra) = nullptr;
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    TORCH_CHECK(library != nullptr, "lightning_zero: the CUDA driver is not loaded.");
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      TORCH_CHECK(function != nullptr, "lightning_zero: the CUDA driver has no ", name, ".");
    };
    look_up(load, "cuModuleLoadData");
    look_up(find, "cuModuleGetFunction");
    look_up(launch, "cuLaunchKernel");
  }
  static const Driver& instance() {
    static const Driver driver;
    return driver;
  }
};

bool aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPack == 0;
}

}  // namespace

RowMeans::RowMeans(const at::Tensor& code, int64_t rows) : rows_(rows) {
  const auto& driver = Driver::instance();
  void* module = nullptr;  // stays loaded: graphs may hold its kernels longer than anybody holds this
  const int error = driver.load(&module, code.const_data_ptr());
  TORCH_CHECK(error == 0, "lightning_zero: cuModuleLoadData failed with error ", error, ".");
  size_t index = 0;
  for (const char* name : {"mean_of_float", "mean_of_half", "mean_of_bfloat16"}) {
    const int missing = driver.find(&kernels_[index++], module, name);
    TORCH_CHECK(missing == 0, "lightning_zero: cuModuleGetFunction(", name, ") failed with error ", missing,
                ".");
  }
}

bool RowMeans::operator()(const at::Tensor& to, const at::Tensor& from, bool add) const {
  const auto dtype = from.scalar_type();
  void* kernel = dtype == at::kFloat      ? kernels_[0]
                 : dtype == at::kHalf     ? kernels_[1]
                 : dtype == at::kBFloat16 ? kernels_[2]
                                          : nullptr;
  if (kernel == nullptr || from.size(0) != rows_ || to.scalar_type() != at::kFloat)
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
  const auto wanted = (std::max<int64_t>(packs, n - packs * kPack / item) + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kBlocks));
  const int error =
      Driver::instance().launch(kernel, blocks, 1, 1, kThreads, 1, 1, 0,
                                current_stream(to.device()).native_handle(), arguments, nullptr);
  TORCH_CHECK(error == 0, "lightning_zero: cuLaunchKernel failed with error ", error, ".");
  return true;
}

}  // namespace lightning_zero
