// Memory of the signal kernels: each rank's signal pad, to which all ranks write 32-bit numbers, and words in
// pinned host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace lightning_zero {

inline void check_signal_pads(const std::vector<at::Tensor>& pads, int64_t numel) {
  for (const auto& row : pads) TORCH_INTERNAL_ASSERT(row.scalar_type() == at::kInt && row.numel() >= numel);
}

// Return the addresses that a kernel receives by value in a structure. `offset`: of the first number.
inline std::vector<void*> pad_addresses(const std::vector<at::Tensor>& pads, size_t offset = 0) {
  std::vector<void*> addresses;
  for (const auto& row : pads) addresses.push_back(row.mutable_data_ptr<int>() + offset);
  return addresses;
}

// Devices count with the lower 32 bits.
inline uint32_t low_word(int64_t number) {
  return static_cast<uint32_t>(static_cast<uint64_t>(number));
}

}  // namespace lightning_zero

namespace lightning_zero::device_words {

// 32-bit words in pinned host memory, through which kernels report their waits to the watchdog, and the
// watchdog ends them.
constexpr int BARRIERS = 2;  // channels: gradients, weights
constexpr int READERS = 2;   // of host exchanges, see Reader in signals.h

constexpr int STOP = 0;  // not 0: all waits end
// The number of barriers of a channel that this device has arrived at, and passed.
constexpr int arrived(int channel) {
  return 1 + 2 * channel;
}
constexpr int passed(int channel) {
  return 2 + 2 * channel;
}
// The number of exchanged parts that this device has sent, and received.
constexpr int SENT = 1 + 2 * BARRIERS, RECEIVED = SENT + 1;
// The part that a reader waits for or has waited for last, and the last one that it has waited for.
constexpr int wanted(int reader) {
  return RECEIVED + 1 + 2 * reader;
}
constexpr int got(int reader) {
  return RECEIVED + 2 + 2 * reader;
}
constexpr int COUNT = RECEIVED + 1 + 2 * READERS;

}  // namespace lightning_zero::device_words
