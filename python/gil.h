// The GIL in threads that the interpreter may end under. Until 3.14 Python ends a thread that asks
// for the GIL then, by unwinding its stack, which is the end of the process where a destructor
// asks. So whoever would enter Python late rests instead, until the process is gone.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <utility>

#ifdef Py_LIMITED_API
// Every Python exports it; the headers of the stable ABI leave it out.
extern "C" PyAPI_FUNC(int) PyGILState_Check(void);
#endif

namespace helm {

// Whether the interpreter ends or has ended: only the thread that ends it may still enter.
inline bool python_ends() {
  return Py_IsInitialized() == 0;
}

[[noreturn]] inline void rest() noexcept {
  while (true) pause();
}

// Runs a call that uses nothing but Python's C API: what it throws is the end of this thread.
template <typename Call>
auto in_python(const Call& call) noexcept -> decltype(call()) {
  try {
    return call();
  } catch (...) {
    rest();
  }
}

// Lets go of the GIL for as long as it lives.
class Released {
 public:
  Released() : ends_(python_ends()), thread_(PyEval_SaveThread()) { ++depth(); }
  ~Released() {
    --depth();
    if (!ends_ && python_ends()) rest();
    in_python([this] { PyEval_RestoreThread(thread_); });
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

  // How many of this thread's are alive.
  static int& depth() {
    static thread_local int count = 0;
    return count;
  }

 private:
  bool ends_;  // this thread ends the interpreter
  PyThreadState* thread_;
};

// Holds the GIL for as long as it lives, in whatever thread; false where Python may not be entered
// any more, then or in the thread's life.
class Acquired {
 public:
  Acquired() : held_(!python_ends() || (Released::depth() == 0 && PyGILState_Check() != 0)) {
    if (held_) state_ = in_python(PyGILState_Ensure);
  }
  ~Acquired() {
    if (held_) PyGILState_Release(state_);
  }
  Acquired(const Acquired&) = delete;
  Acquired& operator=(const Acquired&) = delete;
  explicit operator bool() const { return held_; }

 private:
  bool held_;
  PyGILState_STATE state_{};
};

// A reference to a Python object that may be dropped anywhere, without the GIL too.
template <typename Object>
std::shared_ptr<Object> shared_object(Object object) {
  return {new Object(std::move(object)), [](Object* held) {
            const Acquired acquired;
            if (acquired) delete held;
          }};
}

}  // namespace helm
