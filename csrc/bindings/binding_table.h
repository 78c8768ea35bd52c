// Binds classes, methods and argument names to Python. lightning_zero/native/executor_stubs.py declares their
// types for Python, and a test compares both.
#pragma once

#include <torch/library.h>

#include "executor.h"

namespace lightning_zero {

using torch::arg;

// A Python handle on one part of a root object. It keeps the root alive. Only bindings include torch's class
// registry, whose header doubles compile time.
template <class Owner, class Root = Executor>
struct BoundPart : torch::CustomClassHolder {
  explicit BoundPart(c10::intrusive_ptr<Root> root) : root(std::move(root)) {}
  c10::intrusive_ptr<Root> root;
};
using ExecutorHandle = c10::intrusive_ptr<BoundPart<Executor>>;

// Return a function that creates the handle of a part of the executor.
template <class Owner>
auto bind_part() {
  return [](const ExecutorHandle& self) { return c10::make_intrusive<BoundPart<Owner>>(self->root); };
}

// Types of a method's result and arguments, const or not.
template <class Result, class... Args>
struct Signature {};
template <class Result, class Class, class... Args>
Signature<Result, Args...> signature(Result (Class::*)(Args...)) {
  return {};
}
template <class Result, class Class, class... Args>
Signature<Result, Args...> signature(Result (Class::*)(Args...) const) {
  return {};
}

template <class Owner, class Root = Executor>
class BindingTable {
 public:
  BindingTable(torch::Library& m, const char* name, Owner& (*owner)(Root&))
      : class_(m.class_<BoundPart<Owner, Root>>(name)), owner_(owner) {}

  // Bind a method of the owner, or of `part` of the root.
  template <class Method>
    requires std::is_member_function_pointer_v<Method>
  BindingTable& operator()(const char* name, Method method, std::initializer_list<arg> names = {}) {
    return add(name, owner_, method, names);
  }
  template <class Part, class Method>
    requires std::is_member_function_pointer_v<Method>
  BindingTable& operator()(const char* name, Part& (*part)(Root&), Method method,
                           std::initializer_list<arg> names = {}) {
    return add(name, part, method, names);
  }
  template <class Result>
  BindingTable& operator()(const char* name, Result (*function)()) {
    class_.def(name, [function](const Self&) { return function(); });
    return *this;
  }
  // Return the torch class, for bindings that are not methods.
  torch::class_<BoundPart<Owner, Root>>& raw_class() { return class_; }

 private:
  using Self = c10::intrusive_ptr<BoundPart<Owner, Root>>;

  template <class Part, class Method>
  BindingTable& add(const char* name, Part& (*part)(Root&), Method method, std::initializer_list<arg> names) {
    // torch infers the schema from a function with the same argument types.
    const auto define = [&]<class Result, class... Args>(Signature<Result, Args...>) {
      class_.def(
          name,
          [part, method](const Self& self, Args... args) -> Result {
            return (part(*self->root).*method)(std::forward<Args>(args)...);
          },
          "", names);
    };
    define(signature(method));
    return *this;
  }

  torch::class_<BoundPart<Owner, Root>> class_;
  Owner& (*owner_)(Root&);
};

inline Executor& whole_executor(Executor& executor) {
  return executor;
}

// Bind the parts that executors return. Defined in part_bindings.cpp.
void bind_executor_parts(torch::Library& m);

}  // namespace lightning_zero
