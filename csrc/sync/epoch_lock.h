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

#include <functional>
#include <vector>

#include "sync/signals.h"

namespace lightning_zero {

class EpochLock {
 public:
  virtual ~EpochLock() = default;
  virtual void watch(c10::intrusive_ptr<Watchdog> watchdog) {}

  bool is_writing() const { return number_ % 2 != 0; }

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
class HostEpochLock : public EpochLock {
 public:
  // `numbers`: see SharedNumbers.
  HostEpochLock(std::vector<at::Tensor> numbers, int64_t rank)
      : numbers_(std::move(numbers), rank, SequenceId::TURN) {}
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override { numbers_.watch(std::move(watchdog)); }

 private:
  void announce(int64_t number) override;
  void wait_for(int64_t number, bool to_read) override;

  SharedCounters numbers_;
};

// Turns on devices: kernels announce them and wait for them, the host does neither.

// The stream on which weights are read; they are written on the current one.
struct ReaderStream {
  std::function<void()> block_current_stream;  // the current stream waits for it
  std::function<void(const std::function<void()>&)>
      run;  // what this queues goes there, behind what is queued already
};

class DeviceEpochLock : public EpochLock {
 public:
  // `code`: bytes that the device's driver loads, of turns.cu. `rows`: of each rank, a number for each rank,
  // 32 bits, zero, that all ranks can write. `words`: as DeviceBarrier's, whose lane of weights they use.
  DeviceEpochLock(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words, int64_t rank,
                  ReaderStream readers);

 private:
  void announce(int64_t number) override;
  void wait_for(int64_t number, bool to_read) override;
  void launch(void* kernel, int64_t number, const c10::Stream& stream) const;

  void *announce_, *wait_for_;
  std::vector<at::Tensor> pads_;
  at::Tensor words_;
  int64_t rank_;
  ReaderStream readers_;
};

}  // namespace lightning_zero
