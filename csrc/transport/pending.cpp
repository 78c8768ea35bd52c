#include "transport/pending.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <thread>

namespace lightning_zero {

void Pending::wait(const c10::Device& device) {
  for (auto& work : std::exchange(works_, {}))
    watchdog_ ? watchdog_->wait(*work, lane_, number_, what_) : static_cast<void>(work->wait());
  fence_.block(current_stream(device));
  if (auto then = std::exchange(continuation_, {}))
    then();
}

bool Pending::ready() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool Pending::ready_within(std::chrono::milliseconds limit) const {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > deadline)
      return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void fill_with_poison(at::Tensor tensor) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (at::isFloatingType(tensor.scalar_type())) {
    tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    tensor.fill_(tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte ? 0 : -77);
  }
}

}  // namespace lightning_zero
