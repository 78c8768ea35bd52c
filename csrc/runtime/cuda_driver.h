// The few functions of CUDA's driver that are called here, from the library that torch has loaded, so that no
// CUDA is needed to build this.
#pragma once

#include <c10/core/Stream.h>

namespace lightning_zero {

struct CudaDriver {
  int (*load)(void** module, const void* image) = nullptr;
  int (*find)(void** kernel, void* module, const char* name) = nullptr;
  int (*launch_kernel)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void* stream, void** arguments, void** extra) = nullptr;

  static const CudaDriver& instance();  // throws where the driver is not loaded

  // What NVRTC made. It stays loaded: graphs may hold its kernels longer than anybody holds this.
  void* load_module(const void* image) const;
  void* find_kernel(void* module, const char* name) const;
  void launch(void* kernel, unsigned blocks, unsigned threads, const c10::Stream& stream,
              void** arguments) const;
};

}  // namespace lightning_zero
