#include "executor.h"

#include <ATen/core/Tensor.h>

#include "runtime/compat.h"

namespace lightning_zero {

// Lives in autograd's list of final callbacks. Destroyed without having run, it means that the backward was
// interrupted by an exception.
class Executor::Round {
 public:
  explicit Round(Executor& executor)
      : executor_(c10::intrusive_ptr<Executor>::unsafe_reclaim_from_nonowning(&executor)) {}
  ~Round() {
    if (ran_)
      return;
    try {
      executor_->abort_backward();
    } catch (const std::exception&) {
      // See ~Executor: what interrupted the backward is on its way to the user.
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
      gradients_(context_, transports_, communicators_.control(), [this] { begin_round(); }),
      activations_(context_),
      graphs_(context_, communicators_, transports_, weights_, gradients_),
      parameters_(context_, *this, weights_, gradients_) {
  gradients_.before_end(
      [this](bool brought) { brought ? weights_.log().end_backward() : weights_.repeat_gathers(); });
}

Executor::~Executor() {
  try {
    close();
  } catch (const std::exception&) {
    // After an error of the device every call throws, and a destructor that throws ends the process before
    // the error that came first is shown.
  }
}

void Executor::begin_round() {
  auto round = std::make_shared<Round>(*this);
  compat::at_end_of_backward([round] { round->run(); });
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
  weights_.access().take(transports_.make_turns(std::move(numbers)));
}

void Executor::set_device_epoch_lock(const at::Tensor& code, std::vector<at::Tensor> rows) {
  Lock lock(context_.mutex);
  weights_.access().take(transports_.make_device_turns(code, std::move(rows)));
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
  graphs_.forget_replay();
  gradients_.abort();
}

int64_t Executor::epoch() const {
  Lock lock(context_.mutex);
  return context_.epoch;
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
