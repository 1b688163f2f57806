// Carries out tile instructions that the processor refuses, so that the machine code of the amx
// tier can be tested without them.
#include "cpu/isa.h"
#include "tile_registers.h"
#include "tile_tables.h"

#if defined(__x86_64__) && defined(__linux__)
#include <signal.h>
#include <ucontext.h>

#include <cstring>

namespace helm::test {
namespace {

constexpr int kGeneral[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// An instruction in a three-byte VEX prefix with ModRM, and the registers of its thread.
class Instruction {
 public:
  explicit Instruction(greg_t* registers)
      : registers_(registers),
        code_(reinterpret_cast<const unsigned char*>(registers[REG_RIP])),
        mod_(code_[4] >> 6) {}

  // Opcode, map 0F38 and prefix: 0 none, 1 66, 2 F3, 3 F2.
  bool is(int opcode, int prefix) const {
    return code_[0] == 0xc4 && (code_[1] & 0x1f) == 2 && (code_[2] & 3) == prefix &&
           code_[3] == opcode;
  }
  bool in_memory() const { return mod_ != 3; }
  int reg() const { return code_[4] >> 3 & 7; }
  int rm() const { return code_[4] & 7; }
  int vvvv() const { return ~code_[2] >> 3 & 15; }

  // Of the operand in memory.
  char* address() const {
    const bool sib = rm() == 4;
    const int base = (sib ? code_[5] & 7 : rm()) | (code_[1] & 0x20 ? 0 : 8);
    if (mod_ == 0 && (base & 7) == 5) {
      return reinterpret_cast<char*>(displacement() + (sib ? 0 : registers_[REG_RIP] + length()));
    }
    return reinterpret_cast<char*>(registers_[kGeneral[base]] + displacement());
  }
  // The scaled index register.
  int64_t stride() const {
    const int index = (code_[5] >> 3 & 7) | (code_[1] & 0x40 ? 0 : 8);
    return index == 4 ? 0 : registers_[kGeneral[index]] << (code_[5] >> 6);
  }
  void skip() { registers_[REG_RIP] += length(); }

 private:
  int before_displacement() const { return rm() == 4 ? 6 : 5; }
  int displacement_bytes() const {
    if (mod_ == 1) return 1;
    const int base = rm() == 4 ? code_[5] & 7 : rm();
    return mod_ == 2 || (mod_ == 0 && base == 5) ? 4 : 0;
  }
  int length() const { return in_memory() ? before_displacement() + displacement_bytes() : 5; }
  int64_t displacement() const {
    const unsigned char* p = code_ + before_displacement();
    if (displacement_bytes() == 1) return static_cast<signed char>(*p);
    int32_t value = 0;
    std::memcpy(&value, p, static_cast<size_t>(displacement_bytes()));
    return value;
  }

  greg_t* registers_;
  const unsigned char* code_;
  int mod_;
};

// Whether it was one of those that the kernels use.
bool carry_out(const Instruction& i) {
  TileRegisters& tiles = tile_registers();
  if (i.is(0x49, 0) && i.in_memory()) {
    tiles.configure(i.address());
  } else if (i.is(0x49, 0)) {
    tiles.release();
  } else if (i.is(0x4b, 3)) {
    tiles.load(i.reg(), i.address(), i.stride());
  } else if (i.is(0x4b, 2)) {
    tiles.store(i.reg(), i.address(), i.stride());
  } else if (i.is(0x5c, 2)) {
    tiles.dot(i.reg(), i.rm(), i.vvvv());
  } else {
    return false;
  }
  return true;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  Instruction instruction(static_cast<ucontext_t*>(context)->uc_mcontext.gregs);
  if (carry_out(instruction)) {
    instruction.skip();
  } else {
    signal(SIGILL, SIG_DFL);  // and so ends the process where it stands
  }
}

}  // namespace

// doctest puts its own handler in place for every test case and takes it away afterwards.
const cpu::KernelTable* trapped_amx() {
  if (cpu::kernels_of(cpu::Isa::kAmx) != nullptr) return nullptr;
  if (cpu::kernels_of(cpu::Isa::kAvx512Bf16) == nullptr) return nullptr;
  if (cpu::kernels_amx() == nullptr) return nullptr;
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  return cpu::kernels_amx();
}

}  // namespace helm::test
#else
namespace helm::test {
const cpu::KernelTable* trapped_amx() {
  return nullptr;
}
}  // namespace helm::test
#endif
