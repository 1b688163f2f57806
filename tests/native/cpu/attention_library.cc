// The attention kernels as a C library, for tests in Python (tests/engine/test_merge.py).
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace {

const helm::cpu::KernelTable* available(const char* tier) {
  for (const helm::cpu::IsaStatus& status : helm::cpu::isa_report()) {
    if (status.available && tier == std::string(helm::cpu::isa_name(status.isa))) {
      return helm::cpu::kernels_of(status.isa);
    }
  }
  return nullptr;
}

}  // namespace

extern "C" {

// Whether this machine has the tier.
int helm_has_tier(const char* tier) {
  return available(tier) != nullptr;
}

// Partial attention of one query, q [group, head_dim], to `count` f32 keys and values
// [count, head_dim] that begin at position `first_key`: m, s [group], o [group, head_dim].
void helm_attend(const char* tier, int64_t group, int64_t head_dim, int64_t count, int64_t query,
                 int64_t first_key, int64_t window, float scale, const float* q, const float* k,
                 const float* v, float* m, float* s, float* o) {
  const helm::cpu::KernelTable& table = *available(tier);
  std::vector<double> scratch(static_cast<size_t>(table.scratch_bytes(head_dim)) / sizeof(double) +
                              8);
  const auto address = reinterpret_cast<uintptr_t>(scratch.data());
  void* aligned = reinterpret_cast<void*>((address + 63) / 64 * 64);
  helm::cpu::AttentionArgs args{};
  args.q = q;
  args.q_stride = group * head_dim;
  args.queries = 1;
  args.group = group;
  args.head_dim = head_dim;
  args.first_query = query;
  args.first_key = first_key;
  args.window = window;
  args.scale = scale;
  args.span.k = k;
  args.span.v = v;
  args.span.count = count;
  args.m = m;
  args.s = s;
  args.o = o;
  args.scratch = aligned;
  table.attention[static_cast<int>(helm::DType::kF32)](args);
}

// Merges partial b into a; rows of head_dim outputs each.
void helm_merge(const char* tier, int64_t rows, int64_t head_dim, float* m_a, float* s_a,
                float* o_a, const float* m_b, const float* s_b, const float* o_b) {
  available(tier)->attention_merge(rows, head_dim, m_a, s_a, o_a, m_b, s_b, o_b);
}
}
