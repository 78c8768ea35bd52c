#include "executor.h"

#include <ATen/core/Tensor.h>

#include "torch_compat.h"

namespace lightning_zero {

// Owned by autograd's list of final callbacks. If it is destroyed without having run, an exception
// interrupted the backward.
class Executor::BackwardGuard {
 public:
  explicit BackwardGuard(Executor& executor)
      : executor_(c10::intrusive_ptr<Executor>::unsafe_reclaim_from_nonowning(&executor)) {}
  ~BackwardGuard() {
    if (ran_)
      return;
    try {
      executor_->abort_backward();
    } catch (const std::exception&) {
      // See ~Executor: the exception that interrupted the backward is already propagating.
    }
  }
  void run() {
    ran_ = true;
    executor_->gradients_.end_backward();
  }

 private:
  c10::intrusive_ptr<Executor> executor_;
  bool ran_ = false;
};

Executor::Executor(const Communicators::Names& groups, const std::string& device)
    : context_(device),
      communicators_(context_, groups),
      transports_(context_, communicators_),
      weights_(context_, transports_, communicators_),
      gradients_(context_, transports_, communicators_.control(), [this] { guard_backward(); }),
      activations_(context_),
      graphs_(context_, communicators_, transports_, weights_, gradients_),
      parameters_(context_, *this, weights_, gradients_) {
  gradients_.before_end([this](bool has_gradients) {
    has_gradients ? weights_.log().end_backward() : weights_.repeat_gathers();
  });
}

Executor::~Executor() {
  try {
    close();
  } catch (const std::exception&) {
    // After a device error every call throws. A destructor that throws would end the process before the first
    // error is shown.
  }
}

void Executor::guard_backward() {
  auto guard = std::make_shared<BackwardGuard>(*this);
  compat::at_end_of_backward([guard] { guard->run(); });
}

void Executor::watch(c10::intrusive_ptr<Watchdog> watchdog) {
  Lock lock(context_.mutex);
  communicators_.watch(watchdog);
  weights_.access().watch(watchdog);
  context_.watchdog = std::move(watchdog);
}

void Executor::configure(ExecutorOptions options) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(!gradients_.backward().goes_on(), "options cannot change during backward");
  context_.options = std::move(options);
  communicators_.configure(context_.options);
  gradients_.pools().release();
  gradients_.pools().clear();
  gradients_.layout().forget();
}

void Executor::set_staging(std::vector<at::Tensor> staging, const std::string& group_name,
                           int64_t timeout_ms) {
  Lock lock(context_.mutex);
  TORCH_INTERNAL_ASSERT(!gradients_.backward().goes_on());
  transports_.set_staging(std::move(staging), group_name, timeout_ms);
  gradients_.pools().clear();
}

void Executor::set_epoch_lock(std::vector<at::Tensor> numbers) {
  Lock lock(context_.mutex);
  weights_.access().set_epoch_lock(transports_.make_epoch_lock(std::move(numbers)));
}

void Executor::set_device_epoch_lock(const at::Tensor& code, std::vector<at::Tensor> pads) {
  Lock lock(context_.mutex);
  weights_.access().set_epoch_lock(transports_.make_device_epoch_lock(code, std::move(pads)));
}

void Executor::begin_training_step() {
  Lock lock(context_.mutex);
  weights_.access().begin_step(transports_.next_step());
  weights_.log().begin_step();
  transports_.begin_step(gradients_.backward().goes_on());
}

void Executor::abort_backward() {
  Lock lock(context_.mutex);
  graphs_.abort();
  graphs_.clear_replay();
  gradients_.abort();
}

int64_t Executor::shard_version() const {
  Lock lock(context_.mutex);
  return context_.shard_version;
}

void Executor::reset_counters() {
  Lock lock(context_.mutex);
  context_.counters.clear();
}

std::map<std::string, int64_t> Executor::counters() const {
  Lock lock(context_.mutex);
  auto all = context_.counters;
  gradients_.add_counters(all);
  all["watched_weights"] = static_cast<int64_t>(weights_.watched());
  return all;
}

void Executor::close() {
  Lock lock(context_.mutex);
  if (context_.watchdog) {
    context_.watchdog->activity().forget_names();
    context_.watchdog->activity().forget_replays();
  }
  parameters_.unregister();
  weights_.close();
  gradients_.close();
  transports_.close();
  graphs_.close();
  context_.records.clear();
}

}  // namespace lightning_zero
