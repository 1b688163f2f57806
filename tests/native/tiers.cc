// Lists the tiers once and says which ones the machine lacks.
#include "tiers.h"

#include <doctest/doctest.h>

#include <string>

namespace helm::test {

const std::vector<const cpu::KernelTable*>& tiers() {
  static const std::vector<const cpu::KernelTable*> list = [] {
    std::vector<const cpu::KernelTable*> found;
    for (const cpu::IsaStatus& s : cpu::isa_report()) {
      if (s.available) {
        found.push_back(cpu::kernels_of(s.isa));
      } else {
        MESSAGE("skipping tier " << std::string(cpu::isa_name(s.isa)) << ": " << s.reason);
      }
    }
    return found;
  }();
  return list;
}

Scratch::Scratch(const cpu::KernelTable& table, int64_t head_dim)
    : bytes_((table.scratch_bytes(head_dim) + 63) / 64 * 64) {}

}  // namespace helm::test
