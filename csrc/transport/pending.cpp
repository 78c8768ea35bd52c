#include "transport/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <thread>

#include "torch_compat.h"

namespace lightning_zero {

namespace {

constexpr std::chrono::milliseconds kSleepSlice{
    100};  // interval between checks of the watchdog during a sleep

// A launched all-gather, as _c10d_functional::wait_tensor expects it.
class PendingWork : public c10d::Work {
 public:
  PendingWork(Pending pending, std::vector<at::Tensor> sources, c10::Device device)
      : pending_(std::move(pending)), sources_(std::move(sources)), device_(device) {}
  bool wait(std::chrono::milliseconds) override {
    pending_.wait(device_);
    return true;
  }
  bool isCompleted() override { return pending_.ready(); }

 private:
  Pending pending_;
  std::vector<at::Tensor> sources_;
  c10::Device device_;
};

}  // namespace

Pending::Pending() = default;
Pending::Pending(const Pending&) = default;
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(const Pending&) = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Pending::~Pending() = default;

void Pending::wait(const c10::Device& device) {
  for (auto& work : std::exchange(works_, {}))
    watchdog_ ? watchdog_->wait(*work, sequence_, number_, what_) : static_cast<void>(work->wait());
  if (arrives_ > std::chrono::steady_clock::now())
    sleep();
  fence_.block(current_stream(device));
  if (auto then = std::exchange(continuation_, {}))
    then();
}

void Pending::sleep() const {
  std::optional<Watchdog::Waiting> waiting;
  if (watchdog_)
    waiting.emplace(*watchdog_, sequence_, number_, what_);
  while (!ready()) {
    std::this_thread::sleep_until(std::min(arrives_, std::chrono::steady_clock::now() + kSleepSlice));
    if (watchdog_)
      watchdog_->check();
  }
}

bool Pending::ready() const {
  return std::chrono::steady_clock::now() >= arrives_ &&
         std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
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

void register_pending(const at::Tensor& tensor, Pending pending, std::vector<at::Tensor> sources,
                      const c10::Device& device) {
  compat::register_work(tensor,
                        c10::make_intrusive<PendingWork>(std::move(pending), std::move(sources), device));
}

void fill_with_nan(at::Tensor tensor) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type())) {
    tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    tensor.fill_(tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte ? 0 : -77);
  }
}

}  // namespace lightning_zero
