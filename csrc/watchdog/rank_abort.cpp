#include "watchdog/rank_abort.h"

#include <c10/util/Exception.h>

#include "torch_compat.h"

namespace lightning_zero {

void RankAbort::on_abort(std::string op) {
  std::lock_guard lock(mutex_);
  abort_op_ = std::move(op);
}

void RankAbort::begin_stage() {
  std::lock_guard lock(mutex_);
  activity_.begin_stage();
  failed_ = false;
  skip_grace_ = false;
  if (!ending_)
    activity_.release_device_waits(false);
}

bool RankAbort::fail() {
  std::lock_guard lock(mutex_);
  if (failed_)
    return false;
  failed_ = true;
  activity_.release_device_waits(true);
  return !ending_;  // if another rank caused the abort, that rank has told all others
}

void RankAbort::abort(const std::string& kind, const std::string& text, Clock::time_point deadline) {
  {
    std::lock_guard lock(mutex_);
    kind_ = kind;
    text_ = text;
    deadline_ = deadline;
    activity_.release_device_waits(true);
  }
  ending_.store(true, std::memory_order_release);
}

void RankAbort::check() {
  if (!ending_.load(std::memory_order_acquire))
    return;
  std::string kind, text;
  {
    std::lock_guard lock(mutex_);
    kind = kind_;
    text = text_;
    raised_ = true;
  }
  raise(kind, text);
}

void RankAbort::raise(const std::string& kind, const std::string& text) const {
  std::string op;
  {
    std::lock_guard lock(mutex_);  // not while Python runs
    op = abort_op_;
  }
  if (!op.empty())
    compat::call(op, {kind, text});
  TORCH_CHECK(false, text);
}

std::string RankAbort::abort_reason() const {
  std::lock_guard lock(mutex_);
  return text_;
}

bool RankAbort::has_failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

bool RankAbort::has_ended() const {
  std::lock_guard lock(mutex_);
  return ending_ || failed_;
}

bool RankAbort::is_overdue() const {
  std::lock_guard lock(mutex_);
  // With a Trainer, a rank whose wait raised reaches fail(). Without one it need not.
  return !failed_ && !(raised_ && activity_.stage() == 0) && Clock::now() > deadline_;
}

}  // namespace lightning_zero
