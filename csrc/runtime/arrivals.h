// How much of what hosts exchange has come to the ranks of this host, which read it out of each other's
// memory.
//
// It comes in parts, in one order. Each rank tells the others how many have come to it, of all exchanges so
// far, which are counted alike on every rank. Nothing else holds readers back: no barrier, and not what they
// do not read.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/shared_numbers.h"
#include "runtime/watchdog.h"

namespace lightning_zero {

// Who waits for a part: the stream on which weights are gathered, or the current one.
enum class Reader : int { GATHERS, CURRENT };

class Arrivals {
 public:
  virtual ~Arrivals() = default;
  virtual void watch(c10::intrusive_ptr<Watchdog> watchdog) {}
  // Whether they are also those of other ranks.
  virtual bool of_peers() const = 0;

  // Parts come next, of which the first has the number `first` + 1. On a device, the current stream is behind
  // all waits for those before, and before all waits for these.
  void begin(int64_t first);
  // What is queued on the current stream of a device next sends the parts up to this one, from 0. Only the
  // watchdog hears of it.
  virtual void send(int64_t part) {}
  // The parts up to this one, from 0, have come to this rank; on a device, once what was queued on the
  // current stream is over.
  virtual void announce(int64_t part) = 0;
  // Returns once these have come to all ranks; on a device, that is when what is queued next on the current
  // stream begins, in a graph, too: there it means the part of the exchange that was begun last.
  virtual void wait_for(int64_t part, Reader reader) = 0;
  // The current stream has waited for all parts of this exchange: whoever waits in a graph that is replayed
  // next, for one of the first so many parts, need not, whether there are so many or not.
  void wait_no_more(int64_t parts) { starts_at(first_ - parts); }

 protected:
  virtual void starts_at(int64_t first) {}
  int64_t number_of(int64_t part) const { return first_ + part + 1; }

 private:
  int64_t first_ = 0;
};

// Of processes on CPUs.
class HostArrivals : public Arrivals {
 public:
  // `numbers`: see SharedNumbers.
  HostArrivals(std::vector<at::Tensor> numbers, int64_t rank)
      : numbers_(std::move(numbers), rank, SequenceId::PART) {}
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override { numbers_.watch(std::move(watchdog)); }
  bool of_peers() const override { return true; }
  void announce(int64_t part) override;
  void wait_for(int64_t part, Reader reader) override;

 private:
  SharedNumbers numbers_;
};

// On devices: kernels announce and wait, the host does neither.
class DeviceArrivals : public Arrivals {
 public:
  // `code`: bytes that the device's driver loads, of arrivals.cu. `rows`: of each rank, a number for each
  // rank, 32 bits, zero, that all ranks can write; one row where no other rank reads. `words`: see
  // device_words.h.
  DeviceArrivals(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words, int64_t rank);
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override;
  bool of_peers() const override { return rows_.size() > 1; }
  void send(int64_t part) override;
  void announce(int64_t part) override;
  void wait_for(int64_t part, Reader reader) override;

 private:
  void starts_at(int64_t first) override;

  void *send_, *announce_, *wait_for_;
  std::vector<at::Tensor> rows_;
  at::Tensor words_;
  int64_t rank_;
  at::Tensor first_;  // on the device, so that a graph finds there what it is replayed for
};

}  // namespace lightning_zero
