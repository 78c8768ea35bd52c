#include "torch_compat.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/COW.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>
#include <memory>

namespace lightning_zero::compat {

int current_backward() {
  return torch::autograd::get_current_graph_task_id();
}

bool is_full_backward() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted == nullptr || wanted->empty();
}

Wanted wanted(const at::Tensor& leaf) {
  if (is_full_backward())
    return Wanted::TO_ACCUMULATE;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const auto found = accumulator ? wanted->find(accumulator.get()) : wanted->end();
  if (found == wanted->end() || !found->second.should_execute())
    return Wanted::NO;
  return found->second.captures_ ? Wanted::TO_RETURN : Wanted::TO_ACCUMULATE;
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

namespace {

struct OwnHook : torch::autograd::FunctionPreHook {
  explicit OwnHook(Hook run) : run(std::move(run)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return {run(grads.at(0))};
  }
  Hook run;
};

bool is_own(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  return dynamic_cast<OwnHook*>(hook.get()) != nullptr;
}

}  // namespace

bool has_hooks(const at::Tensor& leaf) {
  if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr)
    return false;
  const auto& hooks = torch::autograd::impl::hooks(leaf);
  return !std::all_of(hooks.begin(), hooks.end(), is_own);
}

void wrap_user_hooks(const at::Tensor& leaf, Hook first, Hook last) {
  torch::autograd::impl::materialize_autograd_meta(leaf);
  auto& hooks = torch::autograd::impl::hooks(leaf);
  const bool others = has_hooks(leaf);
  if (!hooks.empty() && is_own(hooks.front()) && (!others || is_own(hooks.back())))
    return;
  std::erase_if(hooks, is_own);
  hooks.insert(hooks.begin(), std::make_unique<OwnHook>(std::move(first)));
  if (others)
    hooks.push_back(std::make_unique<OwnHook>(std::move(last)));
}

at::Tensor run_hooks(const at::Tensor& leaf) {
  torch::autograd::variable_list grads(1);
  for (const auto& hook : torch::autograd::impl::hooks(leaf)) grads = (*hook)(grads);
  return grads.at(0);
}

namespace {

template <class Argument>
torch::jit::Stack run(const std::string& op, std::vector<Argument> arguments) {
  torch::jit::Stack stack(std::make_move_iterator(arguments.begin()),
                          std::make_move_iterator(arguments.end()));
  c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), "").callBoxed(&stack);
  return stack;
}

}  // namespace

void call(const std::string& op, std::vector<std::string> arguments) {
  run(op, std::move(arguments));
}

at::Tensor call_on_tensors(const std::string& op, std::vector<at::Tensor> arguments) {
  const auto results = run(op, std::move(arguments));
  return results.empty() ? at::Tensor() : results.back().toTensor();
}

void mark_copy_on_write(const at::Tensor& tensor) {
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (c10::impl::cow::has_simple_data_ptr(storage))
    c10::impl::cow::lazy_clone_storage(storage);  // the clone is dropped at once
}

bool is_copy_on_write(const at::Tensor& tensor) {
  return c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr());
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name) {
  return c10d::resolve_process_group(name);
}

std::string backend_name(c10d::ProcessGroup& group, const c10::Device& device) {
  if (!group.hasBackends())
    return group.getBackendName();
  for (const auto& kind : group.getDeviceTypes()) {
    if (kind.type() == device.type())
      return group.getBackend(device.type())->getBackendName();
  }
  return {};
}

bool compares_collectives() {
  return c10d::debug_level() == c10d::DebugLevel::Detail;
}

void register_work(const at::Tensor& tensor, c10::intrusive_ptr<c10d::Work> work) {
  c10d::register_work(tensor, work);
}

std::function<void()> symmetric_barrier(const at::Tensor& memory, const std::string& group_name,
                                        int64_t timeout_ms, int channel) {
  auto signals = c10d::symmetric_memory::rendezvous(memory, group_name);
  return [signals, timeout_ms, channel] { signals->barrier(channel, static_cast<size_t>(timeout_ms)); };
}

}  // namespace lightning_zero::compat

namespace lightning_zero {

namespace {

template <class Function>
Function* python(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

WithoutPythonLock::WithoutPythonLock() {
  static auto* const is_held = python<int()>("PyGILState_Check");
  static auto* const release = python<void*()>("PyEval_SaveThread");
  static auto* const exists = python<int()>("Py_IsInitialized");
  // After Python's finalization, PyGILState_Check returns 1 on any thread.
  if (is_held != nullptr && release != nullptr && exists != nullptr && exists() != 0 && is_held() != 0)
    thread_ = release();
}

WithoutPythonLock::~WithoutPythonLock() {
  static auto* const take = python<void(void*)>("PyEval_RestoreThread");
  if (thread_ != nullptr)
    take(thread_);
}

}  // namespace lightning_zero
