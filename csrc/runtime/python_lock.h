// Python's lock, which is known only by name: this library does without Python's headers.
//
// Executors go where Python drops them, under its lock. A process group that goes with one joins threads of
// its own, and these want the lock where they drop a tensor that Python made: both would wait for ever.
#pragma once

namespace lightning_zero {

// While it lives this thread does not hold the lock. Nothing happens where it did not, or where there is no
// Python.
class WithoutPythonLock {
 public:
  WithoutPythonLock();
  ~WithoutPythonLock();
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* thread_ = nullptr;  // as Python knows it, where it held the lock
};

}  // namespace lightning_zero
