// Reduces gradients by copies into every rank's memory: a one-sided reduce-scatter.
//
// [Note: one-sided reduce-scatter] If ranks can write each other's memory, each rank copies every peer's part
// of a bucket into that peer's staging memory, all ranks pass a barrier, and each sums what it received in
// float32. Staging memory has two halves, used in turn. A rank that passes the barrier of one round knows
// that all ranks have summed the previous round, so the other half may be overwritten.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "context.h"
#include "gradients/bucket.h"
#include "transport/communicator.h"
#include "transport/row_means.h"
#include "transport/transport.h"

namespace lightning_zero {

namespace {

// elements: aligns copies and sums to cache lines; complex128 needs half as many
constexpr int64_t kAlign = 64;
constexpr int64_t kWidest = 8;  // bytes per element; half a complex128

class PeerReduce : public ReduceTransport {
 public:
  // `staging`: memory of each rank in bytes, a multiple of unit() long. `means`: may be replaced later.
  PeerReduce(const Context& context, Communicator& comm, const RowMeans& means,
             std::vector<at::Tensor> staging);

  // Return the bytes of which staging memory must be a multiple, so that each half holds aligned parts of
  // every rank in any dtype.
  static int64_t unit(int64_t ranks);

  void reduce(ReduceBucket& bucket) override;
  double scale(at::ScalarType) const override { return 1.0; }
  bool averages(at::ScalarType) const override { return true; }
  bool uses_own_send_buffers() const override { return true; }
  int buckets_in_flight() const override { return 4; }  // they hold no memory of their own
  // A host that waits for its peers in each round must not wait for those without such gradients.
  bool launches_early() const override {
    return has_streams(context_.device) || context_.intra_host.size == 1;
  }

  void begin_backward() override;
  void begin_segment() override { rounds_ = 0; }
  int64_t barriers_before() const override { return barriers_before_; }
  void forget_barriers() override { barriers_ = 0; }

  void begin_recording(bool backward) override;
  Traffic end_recording() override;
  void abort_recording() override { barriers_ = barriers_recorded_; }
  void after_replay(const Traffic& traffic) override;

 private:
  void barrier();
  // Send `width` elements of each rank's part, from `begin` on.
  void send_round(ReduceBucket& bucket, int64_t begin, int64_t width);

  const Context& context_;
  Communicator& comm_;
  const RowMeans& means_;
  std::vector<at::Tensor> staging_;  // by rank
  int64_t rounds_ = 0;               // in this segment of a backward
  int64_t barriers_ = 0;             // all since the start
  int64_t barriers_before_ = 0;      // before this backward
  int64_t barriers_recorded_ = 0;    // before the current capture
};

PeerReduce::PeerReduce(const Context& context, Communicator& comm, const RowMeans& means,
                       std::vector<at::Tensor> staging)
    : context_(context), comm_(comm), means_(means), staging_(std::move(staging)) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(staging_.size()) == context_.intra_host.size);
  for (const auto& memory : staging_)
    TORCH_INTERNAL_ASSERT(memory.scalar_type() == at::kByte && memory.numel() > 0 &&
                          memory.numel() == staging_[0].numel() &&
                          memory.numel() % unit(context_.intra_host.size) == 0);
}

int64_t PeerReduce::unit(int64_t ranks) {
  return 2 * kWidest * kAlign * ranks;
}

void PeerReduce::begin_backward() {
  rounds_ = 0;
  barriers_before_ = barriers_;
}

void PeerReduce::begin_recording(bool backward) {
  barriers_recorded_ = barriers_;
  if (backward)
    rounds_ = 0;
}

ReduceTransport::Traffic PeerReduce::end_recording() {
  const Traffic traffic{rounds_, std::exchange(barriers_, barriers_recorded_) - barriers_recorded_};
  if (!has_streams(context_.device))
    barriers_ += traffic.barriers;  // a CPU executes them during the capture
  return traffic;
}

void PeerReduce::after_replay(const Traffic& traffic) {
  if (traffic.rounds > 0)
    rounds_ = traffic.rounds;
  if (has_streams(context_.device))
    barriers_ += traffic.barriers;
}

void PeerReduce::barrier() {
  ++barriers_;
  comm_.barrier_on_current_stream();
}

void PeerReduce::send_round(ReduceBucket& bucket, int64_t begin, int64_t width) {
  const auto size = context_.intra_host.size, rank = context_.intra_host.rank;
  const auto item = static_cast<int64_t>(c10::elementSize(bucket.dtype()));
  const auto half = staging_[0].numel() / 2;
  const auto at_byte = rounds_++ % 2 * half;
  std::vector<Copy> copies;
  for (size_t index = 0; index < bucket.slots().size(); ++index) {
    const auto& slot = bucket.slots()[index];
    const auto numel = slot.record->host_shard_numel();
    const auto from = std::max(begin, slot.offset), to = std::min(begin + width, slot.offset + numel);
    if (from >= to)
      continue;
    const auto run = bucket.send_slice(index);
    const auto* source = static_cast<const char*>(run.const_data_ptr());
    for (int64_t step = 0; step < size; ++step) {
      const auto peer = (rank + step) % size;
      auto* target = static_cast<char*>(staging_[peer].mutable_data_ptr()) + at_byte;
      copies.push_back({target + (rank * width + from - begin) * item,
                        source + (peer * numel + from - slot.offset) * item,
                        static_cast<size_t>((to - from) * item), staging_[peer].storage().data(),
                        run.storage().data(), static_cast<int>(step)});
    }
  }
  comm_.copy(copies);
  if (begin + width == bucket.chunk())
    bucket.record_read(current_stream(context_.device));
  barrier();
  const auto mine = staging_[rank].view(bucket.dtype());
  const auto rows = mine.as_strided({size, width}, {width, 1}, at_byte / item);
  bucket.accumulate(begin, width, make_row_mean(rows, begin, means_));
}

void PeerReduce::reduce(ReduceBucket& bucket) {
  const auto half = staging_[0].numel() / 2;
  const auto most = half / static_cast<int64_t>(c10::elementSize(bucket.dtype())) / context_.intra_host.size;
  bucket.buffer()->pending = comm_.run([&] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    // After the last round of the previous segment, which may have used the same half.
    if (rounds_ == 0)
      barrier();
    for (int64_t begin = 0; begin < bucket.chunk(); begin += most)
      send_round(bucket, begin, std::min(most, bucket.chunk() - begin));
  });
}

}  // namespace

std::unique_ptr<ReduceTransport> make_peer_reduce(const Context& context, Communicator& comm,
                                                  const RowMeans& means, std::vector<at::Tensor> staging) {
  return std::make_unique<PeerReduce>(context, comm, means, std::move(staging));
}

int64_t peer_reduce_unit(int64_t ranks) {
  return PeerReduce::unit(ranks);
}

}  // namespace lightning_zero
