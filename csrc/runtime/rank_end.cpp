#include "runtime/rank_end.h"

#include <c10/util/Exception.h>

#include "runtime/compat.h"

namespace lightning_zero {

void RankEnd::on_abort(std::string op) {
  std::lock_guard lock(mutex_);
  end_op_ = std::move(op);
}

void RankEnd::begin() {
  std::lock_guard lock(mutex_);
  activity_.begin_stage();
  failed_ = false;
  hurried_ = false;
  if (!ending_)
    activity_.let_devices_pass(false);
}

bool RankEnd::fail() {
  std::lock_guard lock(mutex_);
  if (failed_)
    return false;
  failed_ = true;
  activity_.let_devices_pass(true);
  return !ending_;  // or it ends because of another; that one has told everybody
}

void RankEnd::decide(const std::string& kind, const std::string& text, Clock::time_point deadline) {
  {
    std::lock_guard lock(mutex_);
    kind_ = kind;
    text_ = text;
    deadline_ = deadline;
    activity_.let_devices_pass(true);
  }
  ending_.store(true, std::memory_order_release);
}

void RankEnd::check() {
  if (!ending_.load(std::memory_order_acquire))
    return;
  std::string kind, text;
  {
    std::lock_guard lock(mutex_);
    kind = kind_;
    text = text_;
    told_ = true;
  }
  raise(kind, text);
}

void RankEnd::raise(const std::string& kind, const std::string& text) const {
  std::string op;
  {
    std::lock_guard lock(mutex_);  // not while Python runs
    op = end_op_;
  }
  if (!op.empty())
    compat::call(op, {kind, text});
  TORCH_CHECK(false, text);
}

std::string RankEnd::abort_reason() const {
  std::lock_guard lock(mutex_);
  return text_;
}

bool RankEnd::has_failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

bool RankEnd::is_broken() const {
  std::lock_guard lock(mutex_);
  return ending_ || failed_;
}

bool RankEnd::is_overdue() const {
  std::lock_guard lock(mutex_);
  // Under a Trainer, whoever is told comes to fail(); without one, nobody need.
  return !failed_ && !(told_ && activity_.stage() == 0) && Clock::now() > deadline_;
}

}  // namespace lightning_zero
