#include "device.h"

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <cstring>
#include <string_view>

namespace lightning_zero {

namespace {

// cudaMemcpyBatchAsync and its cudaMemcpyAttributes as CUDA 13 has them; 12.8 has another signature. Looked
// up in the library that torch has loaded, so that neither CUDA nor its headers are needed to build this.
struct BatchAttributes {
  int source_order = 1;  // as the stream has it
  int source_hint[2] = {0, 0}, target_hint[2] = {0, 0};
  unsigned flags = 1;  // copy engines rather than multiprocessors
};
using BatchCopy = int (*)(void* const*, const void* const*, const size_t*, size_t, BatchAttributes*, size_t*,
                          size_t, void*);
using OneCopy = int (*)(void*, const void*, size_t, int, void*);
using LastError = int (*)();

struct CudaRuntime {
  BatchCopy copy_batch = nullptr;
  OneCopy copy = nullptr;
  LastError last_error = nullptr;
  CudaRuntime() {
    for (const char* name : {"libcudart.so.13", "libcudart.so.12"}) {
      void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
      if (library == nullptr)
        continue;
      copy = reinterpret_cast<OneCopy>(dlsym(library, "cudaMemcpyAsync"));
      last_error = reinterpret_cast<LastError>(dlsym(library, "cudaGetLastError"));
      if (name == std::string_view("libcudart.so.13"))
        copy_batch = reinterpret_cast<BatchCopy>(dlsym(library, "cudaMemcpyBatchAsync"));
      return;
    }
  }
  static const CudaRuntime& instance() {
    static const CudaRuntime runtime;
    return runtime;
  }
};

constexpr int kByAddress = 4;  // cudaMemcpyDefault

bool copy_in_one_call(const std::vector<Copy>& copies, const c10::Stream& stream) {
  const auto& runtime = CudaRuntime::instance();
  if (stream.device_type() != c10::kCUDA || runtime.copy_batch == nullptr || runtime.last_error == nullptr)
    return false;
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
  for (const auto& copy : copies) {
    to.push_back(copy.to);
    from.push_back(copy.from);
    bytes.push_back(copy.bytes);
  }
  BatchAttributes attributes;
  size_t first = 0;
  if (to.empty() || runtime.copy_batch(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first,
                                       1, stream.native_handle()) == 0)
    return true;
  runtime.last_error();  // or the next kernel would be blamed
  return false;
}

}  // namespace

void copy_all(const std::vector<Copy>& copies, const c10::Stream& stream, bool recorded) {
  if (!has_streams(stream.device())) {
    for (const auto& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    return;
  }
  if (!recorded && copy_in_one_call(copies, stream))
    return;
  // Not by tensors: those of a peer's memory would have to name the peer's device.
  const auto& runtime = CudaRuntime::instance();
  TORCH_INTERNAL_ASSERT(stream.device_type() == c10::kCUDA && runtime.copy != nullptr,
                        "copies between devices need the CUDA runtime that torch has loaded");
  for (const auto& copy : copies) {
    const int error = runtime.copy(copy.to, copy.from, copy.bytes, kByAddress, stream.native_handle());
    TORCH_CHECK(error == 0, "lightning_zero: cudaMemcpyAsync failed with error ", error, ".");
  }
}

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream new_stream(const c10::Device& device) {
  if (!has_streams(device))
    return current_stream(device);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void synchronize(const c10::Stream& stream) {
  if (has_streams(stream.device()))
    stream.synchronize();
}

void Fence::record(const c10::Stream& stream) {
  if (!has_streams(stream.device()))
    return;
  // A fresh event each time: a copy of this fence may still be waited for at the older point.
  event_ = std::make_shared<c10::Event>(stream.device_type());
  event_->record(stream);
}

void Fence::block(const c10::Stream& stream) const {
  if (event_)
    event_->block(stream);
}

bool Fence::passed() const {
  return !event_ || event_->query();
}

}  // namespace lightning_zero
