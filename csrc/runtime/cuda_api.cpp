#include "runtime/cuda_api.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <string_view>
#include <type_traits>

namespace lightning_zero {

const CudaDriver& CudaDriver::instance() {
  static const CudaDriver driver = [] {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    TORCH_CHECK(library != nullptr, "lightning_zero: the CUDA driver is not loaded.");
    CudaDriver found;
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      TORCH_CHECK(function != nullptr, "lightning_zero: the CUDA driver has no ", name, ".");
    };
    look_up(found.load, "cuModuleLoadData");
    look_up(found.find, "cuModuleGetFunction");
    look_up(found.launch_kernel, "cuLaunchKernel");
    return found;
  }();
  return driver;
}

void* CudaDriver::load_module(const void* image) const {
  void* module = nullptr;
  const int error = load(&module, image);
  TORCH_CHECK(error == 0, "lightning_zero: cuModuleLoadData failed with error ", error, ".");
  return module;
}

void* CudaDriver::find_kernel(void* module, const char* name) const {
  void* kernel = nullptr;
  const int error = find(&kernel, module, name);
  TORCH_CHECK(error == 0, "lightning_zero: cuModuleGetFunction(", name, ") failed with error ", error, ".");
  return kernel;
}

void CudaDriver::launch(void* kernel, unsigned blocks, unsigned threads, const c10::Stream& stream,
                        void** arguments) const {
  const int error =
      launch_kernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream.native_handle(), arguments, nullptr);
  TORCH_CHECK(error == 0, "lightning_zero: cuLaunchKernel failed with error ", error, ".");
}

const CudaRuntime& CudaRuntime::instance() {
  static const CudaRuntime runtime = [] {
    CudaRuntime found;
    for (const char* name : {"libcudart.so.13", "libcudart.so.12"}) {
      void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
      if (library == nullptr)
        continue;
      const auto look_up = [&](auto& function, const char* symbol) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
      };
      look_up(found.copy_rows, "cudaMemcpy2DAsync");
      look_up(found.last_error, "cudaGetLastError");
      if (name == std::string_view("libcudart.so.13"))
        look_up(found.copy_batch, "cudaMemcpyBatchAsync");
      break;
    }
    return found;
  }();
  return runtime;
}

}  // namespace lightning_zero
