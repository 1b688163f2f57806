// Stacks and the switch between them. Knows nothing of blocks.
#pragma once

#include <cstddef>

namespace cuda_emulation {

class Fiber {
 public:
  Fiber();  // with a stack of its own
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls entry(argument), which must never return; it may suspend for good.
  void prepare(void (*entry)(void*), void* argument);
  // Runs the fiber until it suspends. From outside it.
  void resume();
  // Back to resume(). From inside it; `done` when prepare() comes next.
  void suspend(bool done);

 private:
  void* stack_;
  void* own_ = nullptr;     // saved stack pointer of the fiber
  void* caller_ = nullptr;  // saved stack pointer of resume()'s caller
  void* asan_own_ = nullptr;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
  void* tsan_own_ = nullptr;
  void* tsan_caller_ = nullptr;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;

  static void start(Fiber* self);
};

}  // namespace cuda_emulation
