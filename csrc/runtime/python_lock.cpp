#include "runtime/python_lock.h"

#include <dlfcn.h>

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
  // Once Python has ended, PyGILState_Check says 1 on any thread.
  if (is_held != nullptr && release != nullptr && exists != nullptr && exists() != 0 && is_held() != 0)
    thread_ = release();
}

WithoutPythonLock::~WithoutPythonLock() {
  static auto* const take = python<void(void*)>("PyEval_RestoreThread");
  if (thread_ != nullptr)
    take(thread_);
}

}  // namespace lightning_zero
