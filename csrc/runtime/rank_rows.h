// What kernels by which ranks meet are given: of each rank a row of 32-bit numbers, which all ranks can
// write.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace lightning_zero {

inline void check_signal_pads(const std::vector<at::Tensor>& pads, int64_t numel) {
  for (const auto& row : pads) TORCH_INTERNAL_ASSERT(row.scalar_type() == at::kInt && row.numel() >= numel);
}

// As a kernel takes them, which gets them by value in a structure. `offset`: of the first number.
inline std::vector<void*> pad_addresses(const std::vector<at::Tensor>& pads, size_t offset = 0) {
  std::vector<void*> addresses;
  for (const auto& row : pads) addresses.push_back(row.mutable_data_ptr<int>() + offset);
  return addresses;
}

// Numbers on devices are the lower 32 bits.
inline uint32_t low_word(int64_t number) {
  return static_cast<uint32_t>(static_cast<uint64_t>(number));
}

}  // namespace lightning_zero
