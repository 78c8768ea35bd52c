#include "transport/communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdlib>
#include <string_view>
#include <thread>

#include "runtime/collectives.h"
#include "runtime/compat.h"
#include "runtime/python_lock.h"
#include "runtime/tensors.h"

namespace lightning_zero {

Communicator::Communicator(const std::string& group_name, const c10::Device& device, SequenceId lane, Line& line)
    : group_(compat::process_group(group_name)),
      device_(device),
      lane_(lane),
      stream_(new_stream(device)),
      line_(line) {}

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

// `what` ranks do together here, in words; empty for what this rank does alone.
template <class Launch>
Pending Communicator::launch(const char* what, Launch&& launch, std::function<void()> then, int64_t bytes) {
  Pending pending;
  const auto received = bytes / size() * (size() - 1);
  const bool meets = *what != 0, replayed = recording_ && has_streams(device_);
  const bool slowed = link && received > 0;
  if (meets && replayed)
    line_.add(lane_);
  if (watchdog_ && meets) {
    watchdog_->check();
    pending.watchdog_ = watchdog_;
    pending.lane_ = lane_;
    pending.number_ = replayed ? 0 : watchdog_->activity().meet(lane_);
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
    if (meets)
      line_.enter(stream_);
    if (slowed)
      link->take(received, stream_, lane_);
    // Not async: c10d then queues the collective on the current stream, ours. It may return no Work.
    for (auto& work : launch(/*async=*/false)) {
      if (work)
        work->wait();
    }
    if (meets)
      line_.leave(stream_);
    if (slowed)
      link->hold(stream_, lane_);
    if (then)
      then();
    pending.fence_.record(stream_);
  }
  if (synchronize_each)
    synchronize(stream_);
  return pending;
}

void Communicator::poison(bool on) {
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
  fill_with_poison(output);
  copies.emplace_back(output, memory);
  return memory;
}

namespace {

// gloo has no collectives of complex numbers. Sums over their real and imaginary parts are the same.
at::Tensor as_real(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return c10::isComplexType(dtype) ? tensor.view(c10::toRealValueType(dtype)) : tensor;
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

std::string Communicator::why_not_captured() const {
  const auto backend = compat::backend_name(*group_, device_);
  if (backend != "nccl")
    return "only NCCL's can be held by graphs, not those of backend '" + backend + "'";
  if (size() == 1)
    return {};
  if (compat::compares_collectives())
    return "TORCH_DISTRIBUTED_DEBUG=DETAIL compares them when a host starts them, as in "
           "no replay";
  // See [Note: collectives in graphs].
  const char* registered = std::getenv("NCCL_GRAPH_REGISTER");
  if (registered == nullptr || registered != std::string_view("0"))
    return "NCCL_GRAPH_REGISTER is not 0, so that those in graphs do not fit together with others";
  return {};
}

void Communicator::refuse_in_graph(const char* what) const {
  if (!recording_ || !has_streams(device_))
    return;
  const auto reason = why_not_captured();
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), what, " by collectives, and ", reason);
}

Pending Communicator::all_gather(at::Tensor output, at::Tensor input, std::optional<at::ScalarType> cast_to) {
  refuse_in_graph("weights are gathered");
  jitter();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  auto target = scratch(output, copies);
  return launch(
      "an all-gather of parameters",
      [&](bool async) {
        c10d::AllgatherOptions options;
        options.asyncOp = async;
        // On an accelerator the cast copy comes from our stream's pool, so freeing it at once is in order.
        auto source = cast_to ? input.to(*cast_to) : input;
        auto whole = as_real(target), part = as_real(source);
        return Works{compat::all_gather(*group_, whole, part, options, 0)};
      },
      copy_back(std::move(copies)), static_cast<int64_t>(output.nbytes()));
}

Pending Communicator::all_gather_group(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  refuse_in_graph("weights are gathered");
  jitter();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (jitter_rng_ && inputs[i].is_alias_of(outputs[i]))
      inputs[i] = inputs[i].clone();  // or it would be poisoned
    outputs[i] = as_real(scratch(outputs[i], copies));
    inputs[i] = as_real(inputs[i]);
  }
  return launch(
      "an all-gather of parameters",
      [&](bool async) {
        c10d::AllgatherOptions options;
        options.asyncOp = async;
        // One kernel for all of them, and one call: on the host each call takes longer than a small transfer.
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
          // Each rank begins with its own part, so that no two read from one rank at a time.
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
  copy_all(copies, stream_, recording_ ? lanes_ : std::vector<c10::Stream>());
}

bool Communicator::record(bool on) {
  recording_ = on;
  while (on && has_streams(device_) && static_cast<int>(lanes_.size()) + 1 < size())
    lanes_.push_back(new_stream(device_));
  return std::exchange(used_, false);
}

void Communicator::join() {
  if (recording_ && used_)
    catch_up();
}

Pending Communicator::run(const std::function<void()>& work) {
  return launch("",
                [&](bool) {
                  work();
                  return Works{};
                },
                {});
}

Pending Communicator::behind(Pending first, const std::function<Pending()>& launch) {
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
  line_.enter(stream);
  signal_all_();
  line_.leave(stream);
}

void Communicator::use_device_barrier(std::shared_ptr<DeviceBarrier> barrier, int lane) {
  signal_all_ = [this, barrier = std::move(barrier), lane] { (*barrier)(lane, current_stream(device_)); };
}

void Communicator::catch_up() {
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
  refuse_in_graph("gradients are reduced");
  jitter();
  const auto bytes = nbytes_of(inputs);
  if (jitter_rng_) {
    for (const auto& output : outputs) fill_with_poison(output);
  }
  if (!has_streams(device_)) {
    // gloo's reduce-scatter is an all-reduce of a copy, in a Work that never says it is completed, so a pool
    // of buffers that asks would wait in vain. All-reducing the inputs themselves, which nobody reads again,
    // gives the same sums and an honest Work.
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
  refuse_in_graph("gradients are reduced");
  jitter();
  // As a reduce-scatter and an all-gather, of which either brings a rank what the others have a part in.
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

}  // namespace lightning_zero
