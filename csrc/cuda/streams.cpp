#include "cuda/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lightning_zero {

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream new_stream(const c10::Device& device) {
  if (!has_streams(device))
    return current_stream(device);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void synchronize(const c10::Stream& stream) {
  if (has_streams(stream.device()))
    stream.synchronize();
}

void Fence::record(const c10::Stream& stream) {
  if (!has_streams(stream.device()))
    return;
  // A new event each time: a copy of this fence may still be waited for at the earlier point.
  event_ = std::make_shared<c10::Event>(stream.device_type());
  event_->record(stream);
}

void Fence::block(const c10::Stream& stream) const {
  if (event_)
    event_->block(stream);
}

bool Fence::passed() const {
  return !event_ || event_->query();
}

}  // namespace lightning_zero
