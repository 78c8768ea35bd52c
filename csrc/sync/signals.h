// Counters in host memory that the processes of one host share, and the signals of exchanges with other
// hosts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "watchdog/watchdog.h"

namespace lightning_zero {

class SharedCounters {
 public:
  // `numbers`: each rank's counter, a 64-bit zero in memory that all ranks can read. `sequence`: under which
  // the watchdog counts them.
  SharedCounters(std::vector<at::Tensor> numbers, int64_t rank, SequenceId sequence);
  void watch(c10::intrusive_ptr<Watchdog> watchdog) { watchdog_ = std::move(watchdog); }

  // Increase this rank's counter. Ranks that see the number also see this rank's earlier writes.
  void set(int64_t number);
  // Return after all counters have reached `number`. `what`: describes the wait.
  void wait_for(int64_t number, const char* what) const;

 private:
  bool all_are(int64_t number) const;

  std::vector<at::Tensor> numbers_;
  int64_t rank_;
  SequenceId sequence_;
  c10::intrusive_ptr<Watchdog> watchdog_;
};

// The reader of a part: the stream of weights, or the current stream.
enum class Reader : int { GATHERS, CURRENT };

// Tells the ranks of this host, which read each other's host shards, how many parts of host exchanges each
// rank has received. Parts arrive in one order and are counted over all exchanges, alike on every rank.
// Nothing else delays readers: neither a barrier nor parts that they do not read.
class RemoteSignals {
 public:
  virtual ~RemoteSignals() = default;
  virtual void watch(c10::intrusive_ptr<Watchdog> watchdog) {}
  // Return true if waits include the parts of other ranks.
  virtual bool from_peers() const = 0;

  // Begin an exchange whose parts are numbered from `first` + 1. On a device, the current stream must be
  // ordered after all waits for earlier parts and before all waits for these.
  void begin(int64_t first);
  // Report to the watchdog that work queued next on the current stream sends the parts up to `part`, from 0.
  virtual void announce_send(int64_t part) {}
  // Announce that this rank has received the parts up to `part`, from 0; on a device, after the work on the
  // current stream.
  virtual void announce(int64_t part) = 0;
  // Return after all ranks have received the parts up to `part`; on a device, make the current stream wait.
  // In a graph, the part belongs to the last exchange before the replay.
  virtual void wait_for(int64_t part, Reader reader) = 0;
  // The current stream has waited for all parts of this exchange, so waits for the first `parts` in the next
  // replayed graph pass, even if there are fewer parts.
  void skip_waits(int64_t parts) { set_first(first_ - parts); }

 protected:
  virtual void set_first(int64_t first) {}
  int64_t number_of(int64_t part) const { return first_ + part + 1; }

 private:
  int64_t first_ = 0;
};

// For processes on CPUs.
class HostRemoteSignals : public RemoteSignals {
 public:
  // `numbers`: see SharedCounters.
  HostRemoteSignals(std::vector<at::Tensor> numbers, int64_t rank)
      : numbers_(std::move(numbers), rank, SequenceId::PART) {}
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override { numbers_.watch(std::move(watchdog)); }
  bool from_peers() const override { return true; }
  void announce(int64_t part) override;
  void wait_for(int64_t part, Reader reader) override;

 private:
  SharedCounters numbers_;
};

// For devices: kernels announce parts and wait for them, and the host does not block.
class DeviceRemoteSignals : public RemoteSignals {
 public:
  // `code`: the compiled signal_kernels.cu. `pads`: each rank's signal pad, one 32-bit number per rank,
  // zeros, which all ranks can write; a single pad if no other rank reads. `words`: see signal_pads.h.
  DeviceRemoteSignals(const at::Tensor& code, std::vector<at::Tensor> pads, at::Tensor words, int64_t rank);
  void watch(c10::intrusive_ptr<Watchdog> watchdog) override;
  bool from_peers() const override { return pads_.size() > 1; }
  void announce_send(int64_t part) override;
  void announce(int64_t part) override;
  void wait_for(int64_t part, Reader reader) override;

 private:
  void set_first(int64_t first) override;

  void *announce_send_, *announce_, *wait_for_;
  std::vector<at::Tensor> pads_;
  at::Tensor words_;
  int64_t rank_;
  at::Tensor first_;  // on the device, so that a graph reads the value of its replay
};

}  // namespace lightning_zero
