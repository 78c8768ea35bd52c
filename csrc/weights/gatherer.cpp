#include "weights/gatherer.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "over_copies.h"
#include "runtime/tensors.h"

namespace lightning_zero {

at::Tensor Gatherer::allocate(int64_t numel, const at::TensorOptions& options) const {
  auto memory = tensors::empty(numel, options);
  if (!context_.options.nan_fill)
    return memory;
  // Poisoned again before it goes back to the allocator.
  return tensors::wrap(memory.mutable_data_ptr(), numel, options,
                       [memory](void*) { fill_with_nan(memory); });
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

}  // namespace lightning_zero
