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

namespace lightning_zero::device_words {

// Integers in pinned memory of the host: what kernels by which ranks wait tell the watchdog, and where it
// ends their waits. Of 32 bits, as the numbers that devices count with.

constexpr int BARRIERS = 2;  // lanes of them: gradients, weights
constexpr int READERS = 2;   // of what hosts exchange: see Reader in weights/exchange.h

constexpr int STOP = 0;  // not 0: nobody must wait any more
// How many barriers of a lane this device has come to, and how many it has passed.
constexpr int arrived(int channel) {
  return 1 + 2 * channel;
}
constexpr int passed(int channel) {
  return 2 + 2 * channel;
}
// Of the parts that hosts exchange: this device has sent its own of so many, and got so many.
constexpr int SENT = 1 + 2 * BARRIERS, RECEIVED = SENT + 1;
// The part for which a reader waits, or has waited last; and the last one that it has waited for.
constexpr int wanted(int reader) {
  return RECEIVED + 1 + 2 * reader;
}
constexpr int got(int reader) {
  return RECEIVED + 2 + 2 * reader;
}
constexpr int COUNT = RECEIVED + 1 + 2 * READERS;

}  // namespace lightning_zero::device_words
