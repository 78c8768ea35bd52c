// The few functions of CUDA's driver and runtime that are called here, looked up in the libraries that torch
// has loaded, so that neither CUDA nor its headers are needed to build this.
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

// Copies between memory that ranks share: where whole weights come from, and where gradients go.

// `bytes` of one tensor's storage to another's.
// Addresses, not tensors: a step has thousands, and making a view takes as long as everything else about
// them.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  const void *to_storage, *from_storage;
  int stream = 0;  // in a graph: those of other lanes go on beside it
};

// Queues copies on `stream`, which must be the current one, in any order: one call of the driver for all of
// them where it has such a call, since on the host each takes longer than a small transfer does.
// `side_streams`: for the lanes beyond the first, when this is recorded into a graph, which has no place for
// that call.
void enqueue_copies(const std::vector<Copy>& copies, const c10::Stream& stream,
                    const std::vector<c10::Stream>& side_streams);

}  // namespace lightning_zero
