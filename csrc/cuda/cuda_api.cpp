#include "cuda/cuda_api.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "cuda/streams.h"

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

namespace {

// Copies of equal size at equal distances, merged into one call and one graph node. A node costs as much time
// as copying a megabyte.
struct PitchedCopy {
  Copy first;
  size_t rows = 1;
  size_t to_pitch = 0, from_pitch = 0;  // bytes
};

constexpr size_t kMaxPitch = (1u << 31) - 1;  // limit of CUDA's memPitch

bool enqueue_batch(const std::vector<Copy>& copies, const c10::Stream& stream) {
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
  runtime.last_error();  // otherwise the next kernel would report this error
  return false;
}

void enqueue_pitched(const PitchedCopy& rows, const c10::Stream& stream) {
  const auto& [to, from, bytes, to_storage, from_storage, index] = rows.first;
  if (!has_streams(stream.device())) {
    for (size_t row = 0; row < rows.rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * rows.to_pitch,
                  static_cast<const char*>(from) + row * rows.from_pitch, bytes);
    return;
  }
  // Not by tensors: those on a peer's memory would have to name the peer's device.
  const auto& runtime = CudaRuntime::instance();
  TORCH_INTERNAL_ASSERT(stream.device_type() == c10::kCUDA && runtime.copy_rows != nullptr,
                        "copies between devices need the CUDA runtime that torch has loaded");
  const int error = runtime.copy_rows(to, rows.to_pitch, from, rows.from_pitch, bytes, rows.rows,
                                      kCopyByAddress, stream.native_handle());
  TORCH_CHECK(error == 0, "lightning_zero: cudaMemcpy2DAsync failed with error ", error, ".");
}

size_t distance(const void* from, const void* to) {
  // wraps to a huge value if `to` is lower
  return reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
}

// Append `copy` as the next row, if it fits.
bool append(PitchedCopy& rows, const Copy& copy) {
  const auto& first = rows.first;
  if (copy.bytes != first.bytes || copy.to_storage != first.to_storage ||
      copy.from_storage != first.from_storage)
    return false;
  const auto to = distance(first.to, copy.to), from = distance(first.from, copy.from);
  if (rows.rows == 1) {
    if (to < copy.bytes || from < copy.bytes || to > kMaxPitch || from > kMaxPitch)
      return false;
    rows.to_pitch = to;
    rows.from_pitch = from;
  } else if (to != rows.rows * rows.to_pitch || from != rows.rows * rows.from_pitch) {
    return false;
  }
  ++rows.rows;
  return true;
}

// Rows have one stream and one storage, since a copy may not span two allocations.
std::vector<PitchedCopy> merge_pitched(const std::vector<Copy>& copies) {
  std::vector<PitchedCopy> all;
  std::vector<std::ptrdiff_t> last;  // by stream; -1: none yet
  for (const auto& copy : copies) {
    last.resize(std::max<size_t>(last.size(), copy.stream + 1), -1);
    auto& index = last[copy.stream];
    if (index >= 0 && append(all[index], copy))
      continue;
    index = static_cast<std::ptrdiff_t>(all.size());
    all.push_back({copy, 1, copy.bytes, copy.bytes});
  }
  return all;
}

}  // namespace

void enqueue_copies(const std::vector<Copy>& copies, const c10::Stream& stream,
                    const std::vector<c10::Stream>& side_streams) {
  if (side_streams.empty() && has_streams(stream.device()) && enqueue_batch(copies, stream))
    return;
  Fence begin;
  begin.record(stream);
  std::vector<char> used(side_streams.size(), 0);
  for (const auto& rows : merge_pitched(copies)) {
    const size_t index = side_streams.empty() ? 0 : rows.first.stream % (side_streams.size() + 1);
    if (index > 0 && !std::exchange(used[index - 1], 1))
      begin.block(side_streams[index - 1]);
    enqueue_pitched(rows, index == 0 ? stream : side_streams[index - 1]);
  }
  for (size_t index = 0; index < side_streams.size(); ++index) {
    if (!used[index])
      continue;
    Fence end;
    end.record(side_streams[index]);
    end.block(stream);
  }
}

}  // namespace lightning_zero
