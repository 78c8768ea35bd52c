// The functions of CUDA's driver and runtime that csrc calls, and batched copies. They are looked up in the
// libraries that torch has loaded, so that a build needs neither CUDA nor its headers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <vector>

namespace lightning_zero {

struct CudaDriver {
  int (*load)(void** module, const void* image) = nullptr;
  int (*find)(void** kernel, void* module, const char* name) = nullptr;
  int (*launch_kernel)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void* stream, void** arguments, void** extra) = nullptr;

  static const CudaDriver& instance();  // throws if the driver is not loaded

  // Load a module that NVRTC compiled. It is never unloaded, because graphs may use its kernels longer than
  // any owner lives.
  void* load_module(const void* image) const;
  void* find_kernel(void* module, const char* name) const;
  void launch(void* kernel, unsigned blocks, unsigned threads, const c10::Stream& stream,
              void** arguments) const;
};

// cudaMemcpyBatchAsync and cudaMemcpyAttributes of CUDA 13; 12.8 has another signature.
struct BatchAttributes {
  int source_order = 1;  // in stream order
  int source_hint[2] = {0, 0}, target_hint[2] = {0, 0};
  unsigned flags = 1;  // prefer copy engines to SMs
};
constexpr int kCopyByAddress = 4;  // cudaMemcpyDefault

struct CudaRuntime {
  // Null if the runtime lacks the function.
  int (*copy_batch)(void* const*, const void* const*, const size_t*, size_t, BatchAttributes*, size_t*,
                    size_t, void* stream) = nullptr;
  int (*copy_rows)(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes, size_t rows,
                   int kind, void* stream) = nullptr;
  int (*last_error)() = nullptr;

  static const CudaRuntime& instance();
};

// A copy of `bytes` from one tensor's storage to another's. It holds addresses, because a step has thousands
// of copies and creating a view costs as much as everything else about one.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  const void *to_storage, *from_storage;
  int stream = 0;  // in a graph: copies of different streams run concurrently
};

// Queue copies on `stream`, which must be the current stream, in any order. One driver call queues all of
// them if the runtime has such a call, because each call costs more than a small transfer. `side_streams`:
// for concurrent copies in a capture, where that call is not allowed.
void enqueue_copies(const std::vector<Copy>& copies, const c10::Stream& stream,
                    const std::vector<c10::Stream>& side_streams);

}  // namespace lightning_zero
