#include "transport/communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/cuda_api.h"
#include "tensor_ops.h"
#include "torch_compat.h"

namespace lightning_zero::compat {

// torch 2.13 renamed the single-tensor collectives of c10d::ProcessGroup and deprecated the old names. torch
// 2.11 has only the old ones. These templates detect the member, so that no version numbers are needed.

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <class Group>
auto all_gather(Group& group, at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options,
                int) -> decltype(group.all_gather_single(output, input, options)) {
  return group.all_gather_single(output, input, options);
}

template <class Group>
WorkPtr all_gather(Group& group, at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options,
                   long) {
  return group._allgather_base(output, input, options);
}

template <class Group>
auto reduce_scatter(Group& group, at::Tensor& output, at::Tensor& input,
                    const c10d::ReduceScatterOptions& options, int)
    -> decltype(group.reduce_scatter_single(output, input, options)) {
  return group.reduce_scatter_single(output, input, options);
}

template <class Group>
WorkPtr reduce_scatter(Group& group, at::Tensor& output, at::Tensor& input,
                       const c10d::ReduceScatterOptions& options, long) {
  return group._reduce_scatter_base(output, input, options);
}

// ---- several collectives in one launch

template <class Group>
auto all_gather_several(Group& group, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                        const c10d::AllgatherOptions& options, int)
    -> decltype(group.all_gather_single_coalesced(outputs, inputs, options)) {
  return group.all_gather_single_coalesced(outputs, inputs, options);
}

template <class Group>
WorkPtr all_gather_several(Group& group, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                           const c10d::AllgatherOptions& options, long) {
  return group.allgather_into_tensor_coalesced(outputs, inputs, options);
}

template <class Group>
auto reduce_scatter_several(Group& group, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                            const c10d::ReduceScatterOptions& options, int)
    -> decltype(group.reduce_scatter_single_coalesced(outputs, inputs, options)) {
  return group.reduce_scatter_single_coalesced(outputs, inputs, options);
}

template <class Group>
WorkPtr reduce_scatter_several(Group& group, std::vector<at::Tensor>& outputs,
                               std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options,
                               long) {
  return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

}  // namespace lightning_zero::compat

namespace lightning_zero {

EmulatedLink::EmulatedLink(double bytes_per_s, const c10::Device& device,
                           const std::optional<at::Tensor>& code)
    : bytes_per_s_(bytes_per_s) {
  if (!code)
    return;
  const auto& driver = CudaDriver::instance();
  void* module = driver.load_module(code->const_data_ptr());
  reserve_ = driver.find_kernel(module, "reserve_link");
  hold_ = driver.find_kernel(module, "hold_stream");
  times_ = tensors::zeros(1 + SEQUENCE_COUNT, at::TensorOptions().dtype(at::kLong).device(device));
}

EmulatedLink::Clock::time_point EmulatedLink::arrival(int64_t bytes) {
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / bytes_per_s_);
  std::lock_guard lock(mutex_);
  free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
  return free_at_;
}

uint64_t* EmulatedLink::time(int64_t which) const {
  return reinterpret_cast<uint64_t*>(times_.mutable_data_ptr<int64_t>()) + which;
}

void EmulatedLink::reserve(int64_t bytes, const c10::Stream& stream, SequenceId sequence) const {
  auto* free_at = time(0);
  auto* arrives = time(1 + static_cast<int64_t>(sequence));
  auto nanoseconds = static_cast<uint64_t>(1e9 * static_cast<double>(bytes) / bytes_per_s_);
  std::array<void*, 3> arguments = {&free_at, &nanoseconds, &arrives};
  CudaDriver::instance().launch(reserve_, 1, 1, stream, arguments.data());
}

void EmulatedLink::hold(const c10::Stream& stream, SequenceId sequence) const {
  auto* arrives = time(1 + static_cast<int64_t>(sequence));
  std::array<void*, 1> arguments = {&arrives};
  CudaDriver::instance().launch(hold_, 1, 1, stream, arguments.data());
}

Communicator::Communicator(const std::string& group_name, const c10::Device& device, SequenceId sequence,
                           CollectiveOrder& order)
    : group_(compat::process_group(group_name)),
      device_(device),
      sequence_(sequence),
      stream_(new_stream(device)),
      order_(order) {}

Communicator::~Communicator() {
  const WithoutPythonLock others_may_have_it;
  group_.reset();
}

int Communicator::rank() const {
  return group_->getRank();
}

int Communicator::size() const {
  return group_->getSize();
}

template <class Launch>
Pending Communicator::launch(const char* what, Launch&& launch, std::function<void()> then, int64_t bytes) {
  Pending pending;
  const auto received = bytes / size() * (size() - 1);
  const bool is_collective = *what != 0, replayed = recording_ && has_streams(device_);
  const bool slowed = link && received > 0;
  if (is_collective && replayed)
    order_.add(sequence_);
  if (watchdog_ && is_collective) {
    watchdog_->check();
    pending.watchdog_ = watchdog_;
    pending.sequence_ = sequence_;
    pending.number_ = replayed ? 0 : watchdog_->activity().advance(sequence_);
    pending.what_ = what;
  }
  if (!has_streams(device_)) {
    pending.works_ = launch(/*async=*/true);
    if (slowed)
      pending.arrives_ = link->arrival(received);
    pending.continuation_ = std::move(then);
    if (synchronize_each)
      pending.wait(device_);
    return pending;
  }
  used_ = true;
  const auto caller = current_stream(device_);
  if (synchronize_each)
    synchronize(caller);
  Fence inputs_ready;
  inputs_ready.record(caller);
  {
    c10::StreamGuard on_our_stream(stream_);
    inputs_ready.block(stream_);
    if (is_collective)
      order_.enter(stream_);
    if (slowed)
      link->reserve(received, stream_, sequence_);
    // Not async: c10d then queues the collective on the current stream, ours, and may return no Work.
    for (auto& work : launch(/*async=*/false)) {
      if (work)
        work->wait();
    }
    if (is_collective)
      order_.leave(stream_);
    if (slowed)
      link->hold(stream_, sequence_);
    if (then)
      then();
    pending.fence_.record(stream_);
  }
  if (synchronize_each)
    synchronize(stream_);
  return pending;
}

void Communicator::set_nan_fill(bool on) {
  jitter_rng_.reset();
  if (on && !has_streams(device_))
    jitter_rng_.emplace(17 + rank());
}

void Communicator::jitter() {
  if (jitter_rng_)
    std::this_thread::sleep_for(std::chrono::microseconds((*jitter_rng_)() % 2000));
}

at::Tensor Communicator::scratch(const at::Tensor& output,
                                 std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  if (!jitter_rng_)
    return output;
  auto memory = tensors::empty_like(output);
  fill_with_nan(output);
  copies.emplace_back(output, memory);
  return memory;
}

namespace {

// gloo has no complex collectives. Sums of real and imaginary parts are equivalent.
at::Tensor as_real(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return c10::isComplexType(dtype) ? tensor.view(c10::toRealValueType(dtype)) : tensor;
}

// gloo has no fp8. Gathers only copy.
at::Tensor as_gathered(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn ? tensor.view(at::kByte) : as_real(tensor);
}

std::function<void()> copy_back(std::vector<std::pair<at::Tensor, at::Tensor>> copies) {
  if (copies.empty())
    return {};
  return [copies = std::move(copies)] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (const auto& [output, scratch] : copies) output.copy_(scratch);
  };
}

int64_t nbytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace

std::string Communicator::no_capture_reason() const {
  const auto backend = compat::backend_name(*group_, device_);
  if (backend != "nccl")
    return "CUDA graphs can contain only NCCL's, not those of backend '" + backend + "'";
  if (size() == 1)
    return {};
  if (compat::compares_collectives())
    return "TORCH_DISTRIBUTED_DEBUG=DETAIL compares them when the host starts them, which a replay "
           "does not do";
  // See [Note: collectives in graphs].
  const char* registered = std::getenv("NCCL_GRAPH_REGISTER");
  if (registered == nullptr || registered != std::string_view("0"))
    return "NCCL_GRAPH_REGISTER is not 0, so those in graphs are incompatible with others";
  return {};
}

void Communicator::check_capturable(const char* what) const {
  if (!recording_ || !has_streams(device_))
    return;
  const auto reason = no_capture_reason();
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), what, " by collectives, and ", reason);
}

Pending Communicator::all_gather(at::Tensor output, at::Tensor input, std::optional<at::ScalarType> cast_to) {
  check_capturable("weights are gathered");
  jitter();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  auto target = scratch(output, copies);
  return launch(
      "an all-gather of parameters",
      [&](bool async) {
        c10d::AllgatherOptions options;
        options.asyncOp = async;
        // On an accelerator the cast copy is allocated on our stream, so freeing it here is safe.
        auto source = cast_to ? input.to(*cast_to) : input;
        auto out = as_gathered(target), in = as_gathered(source);
        return Works{compat::all_gather(*group_, out, in, options, 0)};
      },
      copy_back(std::move(copies)), static_cast<int64_t>(output.nbytes()));
}

Pending Communicator::all_gather_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  // A collective of one rank would start a copy for each weight.
  if (size() == 1 && !jitter_rng_) {
    for (auto* group : {&outputs, &inputs}) {
      for (auto& tensor : *group) tensor = as_gathered(tensor);
    }
    return run([&] {
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      tensors::copy_each(outputs, inputs);
    });
  }
  check_capturable("weights are gathered");
  jitter();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (jitter_rng_ && inputs[i].is_alias_of(outputs[i]))
      inputs[i] = inputs[i].clone();  // otherwise it would be filled with NaN
    outputs[i] = as_gathered(scratch(outputs[i], copies));
    inputs[i] = as_gathered(inputs[i]);
  }
  return launch(
      "an all-gather of parameters",
      [&](bool async) {
        c10d::AllgatherOptions options;
        options.asyncOp = async;
        // One kernel and one call: on the host a call costs more than a small transfer.
        if (has_streams(device_) && outputs.size() > 1)
          return Works{compat::all_gather_several(*group_, outputs, inputs, options, 0)};
        Works works;
        for (size_t i = 0; i < outputs.size(); ++i)
          works.push_back(compat::all_gather(*group_, outputs[i], inputs[i], options, 0));
        return works;
      },
      copy_back(std::move(copies)), nbytes_of(outputs));
}

Pending Communicator::copy_group(std::vector<at::Tensor> outputs,
                                 const std::vector<const std::vector<at::Tensor>*>& sources) {
  jitter();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (auto& output : outputs) output = scratch(output, copies);
  return launch(
      "",
      [&](bool) {
        std::vector<Copy> parts;
        for (size_t i = 0; i < outputs.size(); ++i) {
          auto* begin = static_cast<char*>(outputs[i].mutable_data_ptr());
          const auto bytes = outputs[i].nbytes() / size();
          // Each rank starts with its own part, so that no two ranks read from one rank at a time.
          for (int step = 0; step < size(); ++step) {
            const int from = (rank() + step) % size();
            const auto& source = (*sources[i])[from];
            if (bytes > 0)
              parts.push_back({begin + from * bytes, source.const_data_ptr(), bytes,
                               outputs[i].storage().data(), source.storage().data(), step});
          }
        }
        copy(parts);
        return Works{};
      },
      copy_back(std::move(copies)));
}

void Communicator::copy(const std::vector<Copy>& copies) {
  enqueue_copies(copies, stream_, recording_ ? side_streams_ : std::vector<c10::Stream>());
}

bool Communicator::set_recording(bool on) {
  recording_ = on;
  while (on && has_streams(device_) && static_cast<int>(side_streams_.size()) + 1 < size())
    side_streams_.push_back(new_stream(device_));
  return std::exchange(used_, false);
}

void Communicator::join() {
  if (recording_ && used_)
    block_current_stream();
}

Pending Communicator::run(const std::function<void()>& work) {
  return launch("",
                [&](bool) {
                  work();
                  return Works{};
                },
                {});
}

Pending Communicator::run_after(Pending first, const std::function<Pending()>& launch) {
  std::optional<c10::StreamGuard> on_our_stream;
  if (has_streams(device_))
    on_our_stream.emplace(stream_);
  first.wait(device_);
  return launch();
}

Pending Communicator::barrier() {
  if (signal_all_)
    return run([this] { signal_all(); });
  if (!token_.defined()) {
    token_ = tensors::zeros(1, at::TensorOptions().dtype(at::kInt).device(device_));
    tokens_ = tensors::zeros(size(), token_.options());
  }
  return all_gather(tokens_, token_);
}

void Communicator::use_symmetric_barrier(const at::Tensor& memory, const std::string& group_name,
                                         int64_t timeout_ms, int channel) {
  if (!has_streams(device_))
    return;
  signal_all_ = compat::symmetric_barrier(memory, group_name, timeout_ms, channel);
}

void Communicator::signal_all() {
  const auto stream = current_stream(device_);
  order_.enter(stream);
  signal_all_();
  order_.leave(stream);
}

void Communicator::use_device_barrier(std::shared_ptr<DeviceBarrier> barrier, int channel) {
  signal_all_ = [this, barrier = std::move(barrier), channel] {
    (*barrier)(channel, current_stream(device_));
  };
}

void Communicator::block_current_stream() {
  Fence done;
  done.record(stream_);
  done.block(current_stream(device_));
}

void Communicator::barrier_on_current_stream() {
  if (signal_all_)
    return signal_all();
  auto pending = barrier();
  if (!has_streams(device_))
    pending.wait(device_);
}

Pending Communicator::reduce_scatter_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                                           at::Tensor all_inputs, std::function<void()> then) {
  check_capturable("gradients are reduced");
  jitter();
  const auto bytes = nbytes_of(inputs);
  if (jitter_rng_) {
    for (const auto& output : outputs) fill_with_nan(output);
  }
  if (!has_streams(device_)) {
    // gloo's reduce-scatter is an all-reduce of a copy, and its Work never completes, so a pool that polls it
    // would wait forever. All-reducing the inputs, which are not read again, gives the same sums and a
    // correct Work.
    auto take_own_part = [outputs, inputs, own = rank(), then = std::move(then)]() mutable {
      for (size_t i = 0; i < outputs.size(); ++i) {
        const auto width = outputs[i].numel();
        outputs[i].copy_(inputs[i].narrow(0, own * width, width));
      }
      if (then)
        then();
    };
    return launch(
        "the reduction of gradients",
        [&](bool) {
          c10d::AllreduceOptions options;
          options.reduceOp = c10d::ReduceOp::SUM;
          std::vector<at::Tensor> tensors{as_real(all_inputs)};
          return Works{group_->allreduce(tensors, options)};
        },
        std::move(take_own_part), bytes);
  }
  return launch(
      "the reduction of gradients",
      [&](bool async) {
        c10d::ReduceScatterOptions options;
        options.asyncOp = async;
        options.reduceOp = c10d::ReduceOp::SUM;
        for (auto* tensors : {&outputs, &inputs})
          for (auto& tensor : *tensors) tensor = as_real(tensor);
        return Works{outputs.size() > 1 ? compat::reduce_scatter_several(*group_, outputs, inputs, options, 0)
                                        : compat::reduce_scatter(*group_, outputs[0], inputs[0], options, 0)};
      },
      std::move(then), bytes);
}

Pending Communicator::all_reduce(at::Tensor values, std::function<void()> then) {
  check_capturable("gradients are reduced");
  jitter();
  // As a reduce-scatter and an all-gather, each of which receives the other ranks' parts.
  const auto bytes = 2 * static_cast<int64_t>(values.nbytes());
  return launch(
      "the reduction of gradients",
      [&](bool async) {
        c10d::AllreduceOptions options;
        options.asyncOp = async;
        options.reduceOp = c10d::ReduceOp::SUM;
        std::vector<at::Tensor> tensors{as_real(values)};
        return Works{group_->allreduce(tensors, options)};
      },
      std::move(then), bytes);
}

void Communicator::all_reduce_max(std::vector<int64_t>& values, const char* what) {
  std::vector<at::Tensor> tensors{tensors::numbers(values)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  auto pending = launch(what, [&](bool) { return Works{group_->allreduce(tensors, options)}; }, {});
  pending.wait(device_);
  std::copy_n(tensors[0].const_data_ptr<int64_t>(), values.size(), values.begin());
}

Communicators::Communicators(Context& context, const Names& names)
    : context_(context),
      gathers_(names.gathers, context.device, SequenceId::GATHER, order_),
      reduces_(names.reduces, context.device, SequenceId::REDUCE, order_) {
  context.intra_host = gathers_.ranks();
  context.rank = context.intra_host.rank;
  context.size = context.intra_host.size;
  if (!names.inter_host_reduces.empty()) {
    const auto inter_host = [&](const std::string& name, SequenceId sequence) {
      return std::make_unique<Communicator>(name, context.device, sequence, order_);
    };
    context.replicated = names.inter_host_gathers.empty();
    if (!context.replicated)
      inter_host_gathers_ = inter_host(names.inter_host_gathers, SequenceId::GATHER);
    inter_host_reduces_ = inter_host(names.inter_host_reduces, SequenceId::REDUCE);
    context.inter_host = inter_host_reduces_->ranks();
    context.size *= context.inter_host.size;
  }
  if (context.size == 1)
    return;
  control_.emplace(names.control, c10::Device(c10::kCPU), SequenceId::CONTROL, order_);
  context.rank = control_->ranks().rank;
  TORCH_INTERNAL_ASSERT(control_->ranks().size == context.size, "hosts have different numbers of ranks");
}

std::vector<Communicator*> Communicators::on_device() {
  std::vector<Communicator*> all{&gathers_, &reduces_};
  for (auto* comm : {inter_host_gathers_.get(), inter_host_reduces_.get()}) {
    if (comm != nullptr)
      all.push_back(comm);
  }
  return all;
}

void Communicators::watch(const c10::intrusive_ptr<Watchdog>& watchdog) {
  for (auto* comm : on_device()) comm->watch(watchdog);
  if (control_)
    control_->watch(watchdog);
  if (remote_signals_)
    remote_signals_->watch(watchdog);
}

void Communicators::set_remote_signals(std::unique_ptr<RemoteSignals> remote_signals) {
  remote_signals_ = std::move(remote_signals);
  remote_signals_->watch(context_.watchdog);
}

void Communicators::configure(const ExecutorOptions& options) {
  for (auto* comm : on_device()) {
    comm->synchronize_each = options.sync_collectives;
    comm->set_nan_fill(options.nan_fill);
  }
}

void Communicators::emulate_link(const std::shared_ptr<EmulatedLink>& link) {
  for (auto* comm : {inter_host_gathers_.get(), inter_host_reduces_.get()}) {
    if (comm != nullptr)
      comm->link = link;
  }
}

void Communicators::block_current_stream() {
  for (auto* comm : on_device()) comm->block_current_stream();
}

void Communicators::begin_recording() {
  order_.begin_recording();
  for (auto* comm : on_device()) comm->set_recording(true);
}

void Communicators::join() {
  for (auto* comm : on_device()) comm->join();
}

void Communicators::join_ignoring_errors() {
  for (auto* comm : on_device()) {
    try {
      comm->join();  // otherwise the capture could not be ended
    } catch (const c10::Error&) {
      // The capture is already invalid and can only be ended.
    }
  }
}

CollectiveCounts Communicators::end_recording() {
  const bool inter_host = inter_host_gathers_ && inter_host_gathers_->set_recording(false);
  for (auto* comm : on_device()) comm->set_recording(false);
  auto counts = order_.end_recording();
  counts.inter_host_gathers = inter_host;
  return counts;
}

void Communicators::before_replay(const CollectiveCounts& graph) {
  if (!graph.any())
    return;
  if (context_.watchdog)
    context_.watchdog->check();
  // The graph's collectives follow those launched before. Host exchanges are excluded, since the graph waits
  // for the parts that it reads.
  for (auto* comm : on_device()) {
    if (comm != inter_host_gathers_.get() || graph.inter_host_gathers)
      comm->block_current_stream();
  }
  if (replays_.defined() || !context_.watchdog || context_.size == 1)
    return;
  replays_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).device(context_.device));
  replays_ended_ = tensors::zeros(1, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
}

void Communicators::after_replay(const CollectiveCounts& graph) {
  if (!graph.any() || !context_.watchdog)
    return;
  auto& activity = context_.watchdog->activity();
  const auto gathers = activity.advance(SequenceId::GATHER, graph.gathers);
  const auto reduces = activity.advance(SequenceId::REDUCE, graph.reduces);
  if (!replays_.defined())
    return;
  replays_.add_(1);
  replays_ended_.copy_(replays_, /*non_blocking=*/true);
  if (graph.reduces > 0)  // a backward, whose last collective is a reduction
    activity.watch_replay(replays_ended_, SequenceId::REDUCE, reduces);
  else
    activity.watch_replay(replays_ended_, SequenceId::GATHER, gathers);
}

std::string Communicators::no_capture_reason() {
  for (auto* comm : on_device()) {
    if (auto reason = comm->no_capture_reason(); !reason.empty())
      return reason;
  }
  return {};
}

}  // namespace lightning_zero
