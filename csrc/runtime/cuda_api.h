// The few functions of CUDA's driver and runtime that are called here, looked up in the libraries that torch
// has loaded, so that neither CUDA nor its headers are needed to build this.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>

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

// cudaMemcpyBatchAsync and its cudaMemcpyAttributes as CUDA 13 has them; 12.8 has another signature.
struct BatchAttributes {
  int source_order = 1;  // as the stream has it
  int source_hint[2] = {0, 0}, target_hint[2] = {0, 0};
  unsigned flags = 1;  // copy engines rather than multiprocessors
};
constexpr int kCopyByAddress = 4;  // cudaMemcpyDefault

struct CudaRuntime {
  // Functions that this runtime lacks are null.
  int (*copy_batch)(void* const*, const void* const*, const size_t*, size_t, BatchAttributes*, size_t*,
                    size_t, void* stream) = nullptr;
  int (*copy_rows)(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes, size_t pads,
                   int kind, void* stream) = nullptr;
  int (*last_error)() = nullptr;

  static const CudaRuntime& instance();
};

}  // namespace lightning_zero
