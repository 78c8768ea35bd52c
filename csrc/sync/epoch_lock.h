// A reader/writer lock over the shards that ranks read from each other's memory: epochs of reading and of
// writing alternate.
//
// Each rank has a number that the others read: even while it reads, odd while it writes. The number increases
// by one whenever the rank changes between them. A rank writes after no other rank reads: all numbers are at
// least its own, odd one. It reads after all have written: all numbers are at least its own, even one. A rank
// that has nothing to read or write waits for no other rank, and no rank has to read together with another.
// Ranks must agree only on which write epochs there are, and between which reads.
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

  // Return after this rank may write.
  void begin_writing();
  // Let other ranks read. Returns immediately.
  void end_writing();
  // Return after this rank may read. It must not be writing.
  void wait_to_read();

  // Begin training step `step`: continue from a number that is the same on every rank, independent of earlier
  // steps.
  void begin_step(int64_t step);

 protected:
  // Publish `number`, after this rank's earlier reads and writes.
  virtual void announce(int64_t number) = 0;
  // Order later reads or writes after all ranks have announced `number`.
  virtual void wait_for(int64_t number, bool to_read) = 0;

 private:
  int64_t number_ = 0;
  bool readable_ = true;  // all ranks have written the values that this rank would read now
};

// For processes on CPUs, whose reads and writes have completed when their calls return.
class HostEpochLock : public EpochLock {
 public:
  // `numbers`: see SharedCounters.
  HostEpochLock(std::vector<at::Tensor> numbers, int64_t rank)
      : numbers_(std::move(numbers), rank, SequenceId::TURN) {}
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override { numbers_.watch(std::move(watchdog)); }

 private:
  void announce(int64_t number) override;
  void wait_for(int64_t number, bool to_read) override;

  SharedCounters numbers_;
};

// The stream that reads weights. They are written on the current stream.
struct ReaderStream {
  std::function<void()> block_current_stream;  // make the current stream wait for it
  std::function<void(const std::function<void()>&)>
      run;  // queue work on it, after the work that is already queued on the current stream
};

// For devices: kernels announce epochs and wait for them, and the host does not block.
class DeviceEpochLock : public EpochLock {
 public:
  // `code`: the compiled signal_kernels.cu. `pads`: each rank's signal pad, one 32-bit number per rank,
  // zeros, which all ranks can write. `words`: those of DeviceBarrier, whose channel of weights this uses.
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
