// A number of each rank, in memory that processes of one host share: ranks tell each other how far they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/watchdog.h"

namespace lightning_zero {

class SharedNumbers {
 public:
  // `numbers`: of each rank, one integer of 64 bits, zero, in memory that all can read.
  // `lane`: in which the watchdog counts them.
  SharedNumbers(std::vector<at::Tensor> numbers, int64_t rank, SequenceId lane);
  void watch(c10::intrusive_ptr<Watchdog> watchdog) { watchdog_ = std::move(watchdog); }

  // This rank's, which never goes back: what it did before, others see once they see the number.
  void set(int64_t number);
  // Returns once all are at least that. `what`: is waited for, in words.
  void wait_for(int64_t number, const char* what) const;

 private:
  bool all_are(int64_t number) const;

  std::vector<at::Tensor> numbers_;
  int64_t rank_;
  SequenceId lane_;
  c10::intrusive_ptr<Watchdog> watchdog_;
};

}  // namespace lightning_zero
