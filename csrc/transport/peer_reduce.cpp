// The Executor's way to reduce gradients without a collective. See [Note: gradients pushed to peers].
#include <ATen/ATen.h>

#include <algorithm>

#include "executor.h"

namespace lightning_zero {

namespace {

constexpr int64_t kAlign = 64;  // elements: copies and sums of whole cache lines

}  // namespace

void Executor::set_staging(std::vector<at::Tensor> staging, const std::string& group_name,
                           int64_t timeout_ms) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(tasks_.empty() && static_cast<int64_t>(staging.size()) == size());
  for (const auto& memory : staging)
    TORCH_INTERNAL_ASSERT(memory.scalar_type() == at::kByte &&
                          memory.numel() % (2 * 8 * kAlign * size()) == 0);
  if (!barrier_) {
    reduce_comm_.meet_in(staging[rank()], group_name, timeout_ms, /*channel=*/0);
    gather_comm_.meet_in(staging[rank()], group_name, timeout_ms, /*channel=*/1);
  }
  staging_ = std::move(staging);
  pools_.clear();
}

void Executor::set_barrier(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words) {
  std::lock_guard lock(mutex_);
  barrier_ = std::make_shared<DeviceBarrier>(code, std::move(rows), std::move(words), rank());
  reduce_comm_.meet_by(barrier_, 0);
  gather_comm_.meet_by(barrier_, 1);
  if (watchdog_)
    watchdog_->watch_device(barrier_->words());
}

void Executor::begin_stage() {
  std::lock_guard lock(mutex_);
  if (!control_comm_)
    return;
  auto epochs = at::tensor({epochs_}, at::kLong);
  control_comm_->all_reduce_max(epochs, "the beginning of a stage");
  epochs_ = *epochs.const_data_ptr<int64_t>();
}

void Executor::begin_epoch() {
  std::lock_guard lock(mutex_);
  ++epochs_;
  if (turns_) {
    end_writing();
    turns_->begin_step(epochs_);
  }
  if (!barrier_)
    return;
  const auto stream = current_stream(device_);
  gather_comm_.catch_up();
  reduce_comm_.catch_up();
  if (std::exchange(interrupted_, false)) {
    synchronize(stream);  // all waits have been ended
    barrier_->let_pass(false);
  }
  barrier_->begin_epoch(epochs_, stream);
  if (tasks_.empty())
    meetings_ = 0;  // what an interrupted backward had missed, nobody waits for any more
}

void Executor::push(ReduceBucket& bucket) {
  const auto half = staging_[0].numel() / 2;
  const auto item = static_cast<int64_t>(c10::elementSize(bucket.dtype()));
  const auto most = half / item / size();
  const auto meet = [&] {
    ++meetings_;
    reduce_comm_.meet();
  };
  const auto push_round = [&](int64_t begin, int64_t width, bool last) {
    const auto at_byte = rounds_++ % 2 * half;
    std::vector<Copy> copies;
    for (size_t index = 0; index < bucket.slots().size(); ++index) {
      const auto& slot = bucket.slots()[index];
      const auto numel = slot.record->shard_numel();
      const auto from = std::max(begin, slot.offset), to = std::min(begin + width, slot.offset + numel);
      if (from >= to)
        continue;
      const auto run = bucket.run(index);
      const auto* source = static_cast<const char*>(run.const_data_ptr());
      for (int64_t step = 0; step < size(); ++step) {
        const auto peer = (rank() + step) % size();
        auto* target = static_cast<char*>(staging_[peer].mutable_data_ptr()) + at_byte;
        copies.push_back({target + (rank() * width + from - begin) * item,
                          source + (peer * numel + from - slot.offset) * item,
                          static_cast<size_t>((to - from) * item), staging_[peer].storage().data(),
                          run.storage().data(), static_cast<int>(step)});
      }
    }
    reduce_comm_.copy(copies);
    if (last)
      bucket.read_by(current_stream(device_));
    meet();
    const auto mine = staging_[rank()].view(bucket.dtype());
    bucket.accumulate(mine.as_strided({size(), width}, {width, 1}, at_byte / item), begin, means_);
  };
  bucket.buffer()->pending = reduce_comm_.run([&] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    // After the last round of the backward before, which may have used the same half.
    if (rounds_ == 0)
      meet();
    for (int64_t begin = 0; begin < bucket.chunk(); begin += most) {
      const auto width = std::min(most, bucket.chunk() - begin);
      push_round(begin, width, begin + width == bucket.chunk());
    }
  });
}

void Executor::release(int64_t index) {
  std::lock_guard lock(mutex_);
  const auto position = position_[index];
  if (position.bucket < 0 || buckets_.empty())
    return;
  auto& bucket = buckets_[position.bucket];
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (bucket.state() != ReduceBucket::State::EMPTY)
    bucket.release(position.slot, current_stream(device_));
}

}  // namespace lightning_zero
