#include "weights/gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "gradients/grad_aliasing.h"
#include "tensor_ops.h"
#include "torch_compat.h"

namespace lightning_zero {

at::Tensor Gatherer::allocate(int64_t numel, const at::TensorOptions& options) const {
  auto memory = tensors::empty(numel, options);
  if (!context_.options.nan_fill)
    return memory;
  // Fill with NaN again before the memory returns to the allocator.
  return tensors::wrap(memory.mutable_data_ptr(), numel, options, [memory](void*) { fill_with_nan(memory); });
}

GatherTransport& Gatherer::transport_for(const std::vector<ParamRecord*>& records,
                                         const std::vector<at::Tensor>& outputs, bool grouped) const {
  return **std::find_if(transports_.begin(), transports_.end() - 1, [&](const auto& transport) {
    return transport->can_gather(records, outputs, grouped);
  });
}

Pending Gatherer::gather(ParamRecord& record, at::ScalarType dtype, at::Tensor& output,
                         std::vector<at::Tensor>& sources) {
  if (!output.defined())
    output = allocate(full_numel(record), record.shard.options().dtype(dtype));
  context_.count("gathers");
  context_.count("gather_bytes", static_cast<int64_t>(output.nbytes()));
  context_.set_last_parameter(record);
  const std::vector<ParamRecord*> records{&record};
  std::vector<at::Tensor> outputs{output};
  auto& transport = transport_for(records, outputs, /*grouped=*/false);
  auto pending = transport.gather(records, std::move(outputs), sources, /*grouped=*/false);
  grad_aliasing::note_read_until(record, pending);
  return pending;
}

Pending Gatherer::gather_group(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                               std::vector<at::Tensor>& sources) {
  for (size_t i = 0; i < records.size(); ++i) records[i]->gathered_in.insert(outputs[i].scalar_type());
  auto& transport = transport_for(records, outputs, /*grouped=*/true);
  auto pending = transport.gather(records, std::move(outputs), sources, /*grouped=*/true);
  for (auto* record : records) grad_aliasing::note_read_until(*record, pending);
  return pending;
}

bool Gatherer::is_ready(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const {
  return std::any_of(transports_.begin(), transports_.end(),
                     [&](const auto& transport) { return transport->is_ready(records, dtype); });
}

bool Gatherer::gather_alone(ParamRecord& record, const at::Tensor& output) {
  const std::vector<ParamRecord*> records{&record};
  std::vector<at::Tensor> outputs{output}, sources;
  for (auto& transport : transports_) {
    if (transport->gathers_alone() && transport->can_gather(records, outputs, /*grouped=*/false)) {
      transport->gather(records, std::move(outputs), sources, /*grouped=*/false).wait(context_.device);
      return true;
    }
  }
  return false;
}

namespace {

// Enough for the first kernels of a step, and little memory.
constexpr size_t kMaxPrefetchedGroups = 3;
constexpr int64_t kMaxPrefetchedBytes = 256 << 20;

}  // namespace

PendingGroup start_gather(Gatherer& gatherer, GatherGroup group, std::vector<at::Tensor>& sources) {
  auto buffer = gatherer.allocate(group.numel, group.records[0]->shard.options().dtype(group.dtype));
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  for (const auto* record : group.records) {
    outputs.push_back(flat_range(buffer, offset, gatherer.full_numel(*record)));
    offset += outputs.back().numel();
  }
  TORCH_INTERNAL_ASSERT(offset == group.numel, "a group of ", offset, " elements was planned as ",
                        group.numel);
  auto pending = gatherer.gather_group(group.records, std::move(outputs), sources);
  return {std::move(group), std::move(buffer), std::move(pending)};
}

void GroupPrefetcher::begin_step(bool recording) {
  recording_ = recording;
  for (auto& group : std::exchange(recorded_, {})) {
    if (!gatherer_.is_ready(group.records, group.dtype))
      break;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> sources;
    pending_.push_back(start_gather(gatherer_, std::move(group), sources));
  }
}

at::Tensor GroupPrefetcher::take(const std::vector<ParamRecord*>& records, at::ScalarType dtype,
                                 int64_t numel) {
  if (!gatherer_.is_ready(records, dtype))
    return {};
  GatherGroup group{records, dtype, numel};
  if (recording_) {
    int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    for (const auto& other : recorded_)
      bytes += other.numel * static_cast<int64_t>(c10::elementSize(other.dtype));
    recording_ = bytes <= kMaxPrefetchedBytes && recorded_.size() < kMaxPrefetchedGroups;
    if (recording_)
      recorded_.push_back(group);
  }
  if (pending_.empty())
    return {};
  if (!(pending_.front().group == group)) {
    drop();
    return {};
  }
  auto found = std::move(pending_.front());
  pending_.pop_front();
  context_.count("prefetched_groups");
  register_pending(found.buffer, std::move(found.pending), {}, context_.device);
  return found.buffer;
}

void GroupPrefetcher::drop() {
  // Their memory must not be reused while a copy writes to it.
  for (auto& group : pending_) group.pending.wait(context_.device);
  pending_.clear();
}

void GroupPrefetcher::forget() {
  drop();
  recorded_.clear();
  recording_ = false;
}

namespace {

// Bounds the memory of long evaluation loops between two steps. A step of the largest models has a few
// thousand gathers.
constexpr size_t kMaxEntries = 1 << 16;
// Backwards per step that are logged separately. An entry takes about 64 bytes.
constexpr size_t kMaxBackwards = 64;

}  // namespace

void GatherLog::begin_step() {
  current_.clear();
  backwards_ = 0;
  logging_ = true;
}

void GatherLog::note(Entry entry) {
  logging_ = logging_ && current_.size() < kMaxEntries;
  if (logging_)
    current_.push_back(std::move(entry));
}

GatherLog::Entries GatherLog::take_from(size_t begin) {
  const auto first = current_.begin() + static_cast<std::ptrdiff_t>(std::min(begin, current_.size()));
  Entries taken(std::make_move_iterator(first), std::make_move_iterator(current_.end()));
  current_.erase(first, current_.end());
  return taken;
}

void GatherLog::append(const Entries& entries) {
  for (const auto& entry : entries) note(entry);
}

void GatherLog::end_backward() {
  if (backwards_ < kMaxBackwards) {
    previous_.resize(std::max(previous_.size(), backwards_ + 1));
    previous_[backwards_] = logging_ ? std::move(current_) : Entries{};
  }
  end_skipped();
}

GatherLog::Entries GatherLog::missing() const {
  if (backwards_ >= previous_.size() || !logging_)
    return {};
  const auto& all = previous_[backwards_];
  if (current_.size() > all.size() || !std::equal(current_.begin(), current_.end(), all.begin()))
    return {};
  return {all.begin() + static_cast<std::ptrdiff_t>(current_.size()), all.end()};
}

void GatherLog::end_skipped() {
  current_.clear();
  ++backwards_;
}

}  // namespace lightning_zero
