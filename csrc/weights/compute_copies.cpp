// The Executor's side of shadows: low-precision copies of shards, and fetching peers' copies. See executor.h.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "executor.h"

namespace lightning_zero {

namespace {

// What a step fetches before Dynamo has checked its guards: the weights that the first kernels read, and not
// so many that memory notices.
constexpr size_t kGroupsAhead = 3;
constexpr int64_t kBytesAhead = 256 << 20;

}  // namespace

bool Executor::is_stale(const ParamRecord& record) const {
  return record.shadow_epoch != epoch_ ||
         record.shadow_version != static_cast<int64_t>(record.param._version());
}

void Executor::shadow_is_written(ParamRecord& record) {
  record.shadow_epoch = epoch_;
  record.shadow_version = static_cast<int64_t>(record.param._version());
}

void Executor::write_shadow(ParamRecord& record) {
  TORCH_INTERNAL_ASSERT(!recording_, "a replay would write the shadow of ", record.name, " each time");
  at::NoGradGuard no_grad;
  record.shadow.copy_(record.shard);
  shadow_is_written(record);
  count("shadow_writes");
}

void Executor::add_shadow_memory(at::Tensor copies, at::Tensor shards) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(copies.numel() == shards.numel());
  shadow_memory_.emplace_back(std::move(copies), std::move(shards));
}

void Executor::set_peers(int64_t index, std::vector<at::Tensor> peers) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(peers.size()) == size());
  at(index).peers = std::move(peers);
  shared_ = true;
  published_ = false;
}

void Executor::set_exact(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers) {
  std::lock_guard lock(mutex_);
  auto& record = at(index);
  TORCH_INTERNAL_ASSERT(!record.peers.empty() && static_cast<int64_t>(peers.size()) == size() &&
                        copy.scalar_type() == record.shard.scalar_type());
  record.exact = std::move(copy);
  record.exact_peers = std::move(peers);
  published_ = false;
}

void Executor::take_turns(std::vector<at::Tensor> numbers) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(!turns_ && static_cast<int64_t>(numbers.size()) == size());
  turns_ = std::make_unique<HostTurns>(std::move(numbers), rank());
  turns_->watch(watchdog_);
}

void Executor::take_device_turns(const at::Tensor& code, std::vector<at::Tensor> rows) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(!turns_ && barrier_ && static_cast<int64_t>(rows.size()) == size());
  turns_ = std::make_unique<DeviceTurns>(code, std::move(rows), barrier_->words(), rank(), gather_comm_);
}

void Executor::set_shards(int64_t index, std::vector<at::Tensor> shards) {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(turns_ && static_cast<int64_t>(shards.size()) == size());
  at(index).shards = std::move(shards);
}

void Executor::begin_writing() {
  std::lock_guard lock(mutex_);
  if (!turns_)
    return expire_shadows();
  if (!turns_->writing())
    take_edits();
  begin_turn_to_write();
}

void Executor::begin_turn_to_write() {
  if (turns_->writing())
    return;
  ++epoch_;
  published_ = false;
  drop_ahead();
  turns_->begin_writing();
}

void Executor::end_writing() {
  std::lock_guard lock(mutex_);
  if (!turns_ || !turns_->writing())
    return;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  write_all_shadows();
  turns_->end_writing();
}

void Executor::begin_reading() {
  end_writing();
  turns_->wait_to_read();
  published_ = true;
}

void Executor::write_all_shadows() {
  for (auto& [copies, shards] : shadow_memory_) copies.copy_(shards);
  for (auto& record : records_) {
    if (record->shadow.defined())
      shadow_is_written(*record);
  }
}

void Executor::expire_shadows() {
  std::lock_guard lock(mutex_);
  if (turns_)
    return;  // nothing changes then without begin_writing()
  ++epoch_;
  published_ = false;
  drop_ahead();
}

void Executor::publish(bool everything, bool wait) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::vector<ParamRecord*> stale;
  for (auto& record : records_) {
    if (record->shadow.defined() && (everything || is_stale(*record)))
      stale.push_back(record.get());
  }
  if (!stale.empty())
    drop_ahead();
  // Whether this rank has anything to write is its own affair: all ranks meet here whenever one might.
  if (shared_) {
    auto all_have_read = gather_comm_.barrier();
    if (!stale.empty() || !has_streams(device_))
      all_have_read.wait(device_);
  }
  if (everything) {
    write_all_shadows();
  } else {
    for (auto* record : stale) write_shadow(*record);
  }
  if (!shared_)
    return;
  std::vector<at::Tensor> copies, shards;
  for (auto* record : stale) {
    if (record->exact.defined()) {
      copies.push_back(record->exact);
      shards.push_back(record->shard);
    }
  }
  if (!copies.empty())
    at::_foreach_copy_(copies, shards);
  auto all_have_written = gather_comm_.barrier();
  if (wait || !has_streams(device_))
    all_have_written.wait(device_);
  published_ = true;
}

void Executor::enter(const std::string& digest, const std::string& plan) {
  std::unique_lock lock(mutex_);
  if (recording_)
    return;  // before_replay() does this each time
  if (plans_.count(digest) == 0 && !new_plan_op_.empty()) {
    lock.unlock();  // Python waits there for the other ranks
    torch::jit::Stack stack{digest, plan};
    c10::Dispatcher::singleton().findSchemaOrThrow(new_plan_op_.c_str(), "").callBoxed(&stack);
    lock.lock();
    plans_.insert(digest);
  }
  if (!shared_ && !turns_)
    return;
  if (!tracked_.empty())
    sync_edits(/*forget=*/false);
  noting_first_ = noting_first_ && first_groups_.empty();  // of one graph only
  if (turns_)
    return begin_reading();
  publish(/*everything=*/false);
}

void Executor::write_shadows() {
  std::lock_guard lock(mutex_);
  drop_ahead();
  if (shadow_memory_.empty())
    return;
  turns_ ? begin_reading() : publish(/*everything=*/true);
  noting_first_ = published_;
  for (auto& group : std::exchange(first_groups_, {})) {
    if (!can_copy(group.records, group.dtype))
      break;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<at::Tensor> sources;
    ahead_.push_back(start(std::move(group), sources));
  }
}

Executor::Ahead Executor::start(Group group, std::vector<at::Tensor>& sources) {
  auto buffer = fresh(group.numel, group.records[0]->shard.options().dtype(group.dtype));
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  for (const auto* record : group.records) {
    outputs.push_back(piece(buffer, offset, size() * record->shard_numel()));
    offset += outputs.back().numel();
  }
  TORCH_INTERNAL_ASSERT(offset == group.numel, "a group of ", offset, " elements was planned as ",
                        group.numel);
  auto pending = fetch(group.records, std::move(outputs), sources);
  return {std::move(group), std::move(buffer), std::move(pending)};
}

const std::vector<at::Tensor>& Executor::copies_of(const ParamRecord& record, at::ScalarType dtype) {
  static const std::vector<at::Tensor> none;
  if (record.shard.scalar_type() == dtype)
    return record.shards.empty() ? record.exact_peers : record.shards;
  return record.shadow.defined() && record.shadow.scalar_type() == dtype ? record.peers : none;
}

bool Executor::can_copy(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const {
  return published_ && std::all_of(records.begin(), records.end(), [&](const ParamRecord* record) {
           return !copies_of(*record, dtype).empty();
         });
}

bool Executor::can_read(const std::vector<ParamRecord*>& records) const {
  return turns_ && std::none_of(records.begin(), records.end(),
                                [](const ParamRecord* record) { return record->shards.empty(); });
}

// The same without any other rank. What is wanted in a dtype that nobody keeps is cast here.
Pending Executor::read(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs) {
  begin_reading();
  std::vector<at::Tensor> to;
  std::vector<const std::vector<at::Tensor>*> from;
  for (size_t i = 0; i < records.size(); ++i) {
    const auto& record = *records[i];
    if (const auto& copies = copies_of(record, outputs[i].scalar_type()); !copies.empty()) {
      to.push_back(outputs[i]);
      from.push_back(&copies);
      continue;
    }
    auto whole = at::empty({outputs[i].numel()}, record.shard.options());
    gather_comm_.copy_group({whole}, {&record.shards}).wait(device_);
    outputs[i].copy_(whole);
  }
  count("copied_weights", static_cast<int64_t>(records.size()));
  return gather_comm_.copy_group(std::move(to), from);
}

// Starts to bring whole weights into `outputs`. `sources` must live until they are there.
Pending Executor::fetch(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                        std::vector<at::Tensor>& sources) {
  if (can_read(records))
    return read(records, std::move(outputs));
  const auto dtype = outputs[0].scalar_type();
  const bool alike =
      std::all_of(outputs.begin(), outputs.end(), [&](const auto& o) { return o.scalar_type() == dtype; });
  if (alike && can_copy(records, dtype)) {
    std::vector<const std::vector<at::Tensor>*> peers;
    for (const auto* record : records) peers.push_back(&copies_of(*record, dtype));
    count("copied_weights", static_cast<int64_t>(records.size()));
    return gather_comm_.copy_group(std::move(outputs), peers);
  }
  for (size_t i = 0; i < records.size(); ++i) {
    auto source = source_in(*records[i], outputs[i].scalar_type());
    sources.push_back(source.defined() ? std::move(source) : records[i]->shard.to(outputs[i].scalar_type()));
  }
  return gather_comm_.all_gather_group(std::move(outputs), sources);
}

// The group, if it has been on its way since the step began; otherwise undefined.
at::Tensor Executor::take_ahead(const std::vector<ParamRecord*>& records, at::ScalarType dtype,
                                int64_t numel) {
  if (!can_copy(records, dtype))
    return {};
  Group group{records, dtype, numel};
  if (noting_first_) {
    int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    for (const auto& other : first_groups_)
      bytes += other.numel * static_cast<int64_t>(c10::elementSize(other.dtype));
    noting_first_ = bytes <= kBytesAhead && first_groups_.size() < kGroupsAhead;
    if (noting_first_)
      first_groups_.push_back(group);
  }
  if (ahead_.empty())
    return {};
  if (!(ahead_.front().group == group)) {
    drop_ahead();
    return {};
  }
  auto found = std::move(ahead_.front());
  ahead_.pop_front();
  count("groups_ahead");
  c10d::register_work(found.buffer, c10::make_intrusive<PendingWork>(std::move(found.pending),
                                                                     std::vector<at::Tensor>{}, device_));
  return found.buffer;
}

void Executor::drop_ahead() {
  // Their memory must not be given to somebody else while it is being written.
  for (auto& group : ahead_) group.pending.wait(device_);
  ahead_.clear();
}

}  // namespace lightning_zero
