// Stack switches in a few instructions on x86-64 and by ucontext elsewhere: swapcontext makes a
// system call, and a block of threads switches millions of times. Sanitizers are told of every
// switch, ThreadSanitizer without an ordering, so that it sees races between threads of a block.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" {
// Present when the program is built with the sanitizer.
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** save, const void* bottom,
                                                          size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* saved, const void** bottom,
                                                           size_t* bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile* address,
                                                         size_t bytes);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}

namespace cuda_emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;  // touched pages only count
constexpr size_t kGuardBytes = 4096;
constexpr unsigned kTsanNoSync = 1;

}  // namespace

#if defined(__x86_64__)
extern "C" void cuda_emulation_switch(void** save, void* to);
asm(R"(
.text
.globl cuda_emulation_switch
.hidden cuda_emulation_switch
.type cuda_emulation_switch, @function
cuda_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  movq %r12, %rdi
  ret
.size cuda_emulation_switch, .-cuda_emulation_switch
)");

namespace {

void switch_stack(void** save, void* to) {
  cuda_emulation_switch(save, to);
}

// A stack from which the switch above returns into entry(argument).
void* initial_stack(void* stack, void (*entry)(void*), void* argument) {
  auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(stack) + kStackBytes);
  *--top = 0;  // entry's return address; keeps the alignment that the ABI asks for
  *--top = reinterpret_cast<uint64_t>(entry);
  top -= 6;  // rbp, rbx, r12 ... r15
  for (int i = 0; i < 6; ++i) top[i] = 0;
  top[3] = reinterpret_cast<uint64_t>(argument);  // r12, moved to the first argument
  return top;
}

}  // namespace
#else
namespace {

void switch_stack(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

void enter(unsigned entry_low, unsigned entry_high, unsigned low, unsigned high) {
  const auto join = [](uint64_t a, uint64_t b) { return a | b << 32; };
  reinterpret_cast<void (*)(void*)>(join(entry_low, entry_high))(
      reinterpret_cast<void*>(join(low, high)));
}

void* initial_stack(void* stack, void (*entry)(void*), void* argument) {
  auto* context = static_cast<ucontext_t*>(stack);  // at the far end of the stack
  getcontext(context);
  context->uc_stack.ss_sp = context + 1;
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  const auto e = reinterpret_cast<uint64_t>(entry), a = reinterpret_cast<uint64_t>(argument);
  makecontext(context, reinterpret_cast<void (*)()>(enter), 4, static_cast<unsigned>(e),
              static_cast<unsigned>(e >> 32), static_cast<unsigned>(a),
              static_cast<unsigned>(a >> 32));
  return context;
}

}  // namespace
#endif

Fiber::Fiber() {
  stack_ = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(stack_, kGuardBytes, PROT_NONE);
  if (__tsan_create_fiber) tsan_own_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (tsan_own_) __tsan_destroy_fiber(tsan_own_);
  munmap(stack_, kGuardBytes + kStackBytes);
}

void Fiber::prepare(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  // What ran here before never returned from its frames.
  if (__asan_unpoison_memory_region) {
    __asan_unpoison_memory_region(static_cast<char*>(stack_) + kGuardBytes, kStackBytes);
  }
  own_ = initial_stack(static_cast<char*>(stack_) + kGuardBytes,
                       reinterpret_cast<void (*)(void*)>(start), this);
}

void Fiber::start(Fiber* self) {
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(nullptr, &self->caller_stack_, &self->caller_stack_bytes_);
  }
  self->entry_(self->argument_);
  __builtin_trap();
}

void Fiber::resume() {
  void* asan_caller = nullptr;
  if (__tsan_switch_to_fiber) {
    tsan_caller_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_own_, kTsanNoSync);
  }
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&asan_caller, static_cast<char*>(stack_) + kGuardBytes,
                                   kStackBytes);
  }
  switch_stack(&caller_, own_);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(asan_caller, nullptr, nullptr);
  }
}

void Fiber::suspend(bool done) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(tsan_caller_, kTsanNoSync);
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(done ? nullptr : &asan_own_, caller_stack_, caller_stack_bytes_);
  }
  switch_stack(&own_, caller_);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(asan_own_, &caller_stack_, &caller_stack_bytes_);
  }
}

}  // namespace cuda_emulation
