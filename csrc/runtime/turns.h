// Ranks read each other's shards out of shared memory, and take turns: a time to read, a time to write, and
// so on.
//
// Each rank has a number that the others read: even while it reads, odd while it writes. It goes on by one
// whenever this rank begins to do the other, and never back. A rank writes once no other reads any more: all
// numbers are at least its own, odd one. It reads once all have written: all are at least its own, even one.
// Who has nothing to read, or nothing to write, waits for nobody, and nobody needs to come along with a
// reader. What must be the same on every rank is only that its shards are written, and between which reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/shared_numbers.h"

namespace lightning_zero {

class Turns {
 public:
  virtual ~Turns() = default;
  virtual void watch(c10::intrusive_ptr<Watchdog> watchdog) {}

  bool writing() const { return number_ % 2 != 0; }

  // Returns once this rank may write.
  void begin_writing();
  // What was to be written is: others may read it. Returns at once.
  void end_writing();
  // Returns once this rank may read; it must not be writing.
  void wait_to_read();

  // A training step begins, the `step`-th: numbers go on from one that is the same on every rank, whatever
  // each of them has done since the step before.
  void begin_step(int64_t step);

 protected:
  // What this rank has read, or written, is over when the others see the number.
  virtual void announce(int64_t number) = 0;
  // What comes next, reads or writes, comes when all have announced that number.
  virtual void wait_for(int64_t number, bool to_read) = 0;

 private:
  int64_t number_ = 0;
  bool readable_ = true;  // all have written what this rank would read now
};

// Of processes on CPUs, whose reads and writes are over when the call that does them returns.
class HostTurns : public Turns {
 public:
  // `numbers`: see SharedNumbers.
  HostTurns(std::vector<at::Tensor> numbers, int64_t rank) : numbers_(std::move(numbers), rank, SequenceId::TURN) {}
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override { numbers_.watch(std::move(watchdog)); }

 private:
  void announce(int64_t number) override;
  void wait_for(int64_t number, bool to_read) override;

  SharedNumbers numbers_;
};

}  // namespace lightning_zero
