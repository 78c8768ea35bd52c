#include "runtime/arrivals.h"

#include <ATen/core/Tensor.h>

#include <array>

#include "runtime/cuda_api.h"
#include "runtime/device.h"
#include "runtime/device_words.h"
#include "runtime/rank_rows.h"
#include "runtime/tensors.h"

namespace lightning_zero {

namespace {

constexpr unsigned kArrivalThreads = 32;  // as in arrivals.cu

}  // namespace

void Arrivals::begin(int64_t first) {
  first_ = first;
  starts_at(first);
}

void HostArrivals::announce(int64_t part) {
  numbers_.set(number_of(part));
}

void HostArrivals::wait_for(int64_t part, Reader) {
  numbers_.wait_for(number_of(part), "weights that other hosts send to other ranks of this one");
}

DeviceArrivals::DeviceArrivals(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words,
                               int64_t rank)
    : rows_(std::move(rows)), words_(std::move(words)), rank_(rank) {
  const auto& driver = CudaDriver::instance();
  auto* module = driver.load_module(code.const_data_ptr());
  send_ = driver.find_kernel(module, "tell_sending");
  announce_ = driver.find_kernel(module, "announce_parts");
  wait_for_ = driver.find_kernel(module, "wait_for_parts");
  TORCH_INTERNAL_ASSERT(words_.is_pinned() && words_.scalar_type() == at::kInt &&
                        words_.numel() >= device_words::COUNT);
  check_rows(rows_, static_cast<int64_t>(rows_.size()));
  first_ = tensors::zeros(1, rows_[static_cast<size_t>(rank)].options());
}

void DeviceArrivals::watch(c10::intrusive_ptr<Watchdog> watchdog) {
  if (watchdog)
    watchdog->activity().watch_device(words_);
}

void DeviceArrivals::starts_at(int64_t first) {
  first_.fill_(static_cast<int32_t>(low_word(first)));
}

void DeviceArrivals::send(int64_t part) {
  void* host = words_.mutable_data_ptr<int>();
  int sent = device_words::SENT;
  auto number = low_word(number_of(part));
  std::array<void*, 3> arguments = {&host, &sent, &number};
  CudaDriver::instance().launch(send_, 1, 1, current_stream(first_.device()), arguments.data());
}

void DeviceArrivals::announce(int64_t part) {
  auto rows = row_addresses(rows_);
  int rank = static_cast<int>(rank_);
  auto number = low_word(number_of(part));
  void* host = words_.mutable_data_ptr<int>();
  int come = device_words::COME;
  // The first is a structure that the kernel takes by value.
  std::array<void*, 5> arguments = {rows.data(), &rank, &number, &host, &come};
  CudaDriver::instance().launch(announce_, 1, kArrivalThreads, current_stream(first_.device()),
                                arguments.data());
}

void DeviceArrivals::wait_for(int64_t part, Reader reader) {
  auto rows = row_addresses(rows_);
  int rank = static_cast<int>(rank_);
  void* first = first_.mutable_data_ptr<int>();
  auto parts = low_word(part + 1);
  void* host = words_.mutable_data_ptr<int>();
  const auto number = static_cast<int>(reader);
  int wanted = device_words::wanted(number), got = device_words::got(number);
  std::array<void*, 7> arguments = {rows.data(), &rank, &first, &parts, &host, &wanted, &got};
  CudaDriver::instance().launch(wait_for_, 1, kArrivalThreads, current_stream(first_.device()),
                                arguments.data());
}

}  // namespace lightning_zero
