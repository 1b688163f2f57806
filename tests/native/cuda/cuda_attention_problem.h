// Attention over random pages for the CUDA kernels under emulation, and what double precision says.
#pragma once

#include <cstring>
#include <sstream>

#include "cuda_step.h"

namespace helm::test {

struct Problem {
  std::vector<RunShape> runs;
  int64_t heads = 4, kv_heads = 2, head_dim = 32;
  int64_t page_tokens = 16;
  int64_t window = 0;
  int64_t splits = 1;
  float scale = 0.3f;
  int compute = 0;  // of the GPU; 0: one without tensor cores
  float softcap = 0;
};

// The emulated GPU has this capability, of which it had 7.5, until the end of the test.
class Capability {
 public:
  explicit Capability(int compute) {
    if (compute > 0) cuda_emulation::set_compute_capability(compute / 10, compute % 10);
  }
  ~Capability() { cuda_emulation::set_compute_capability(7, 5); }
  Capability(const Capability&) = delete;
  Capability& operator=(const Capability&) = delete;
};

inline constexpr int32_t kLayers = 3;
inline constexpr int64_t kLayer = 1;

// Inputs of one problem. Pages hold random K and V of `layer` at visible positions, NaN elsewhere.
struct Data {
  Data(const Problem& p, DType dtype, uint32_t seed)
      : step(p.runs, p.page_tokens, kLayers, p.kv_heads, seed),
        width((p.heads + 1) * p.head_dim + 3),
        x(random_floats(step.tokens * width, seed + 1)),
        pool(step.pages.size() * 2 * p.kv_heads * p.page_tokens * p.head_dim * dtype_bytes(dtype)),
        out(step.tokens * p.heads * p.head_dim),
        partials(cuda::attention_partials_bytes(step.tokens, p.heads, p.head_dim, p.splits)),
        kv{pool.data(), dtype, p.page_tokens, p.kv_heads, p.head_dim} {
    std::memset(pool.data(), 0xff, static_cast<size_t>(pool.size()));
    for (size_t r = 0; r < p.runs.size(); ++r) {
      for (int64_t j = 0; j < p.runs[r].first_position + p.runs[r].tokens; ++j) {
        for (int64_t slab = 0; slab < 2 * p.kv_heads; ++slab) {
          const auto row =
              encode(dtype, random_floats(p.head_dim, static_cast<uint32_t>(seed + j * 31 + slab)));
          std::memcpy(
              pool.data() + step.row_at(kv, r, kLayer, slab % p.kv_heads, j, slab >= p.kv_heads) *
                                dtype_bytes(dtype),
              row.data(), row.size());
        }
      }
    }
  }

  cuda::AttentionArgs args(const Problem& p) const {
    return {x.data(),
            width,
            p.head_dim,
            out.data(),
            nullptr,
            p.heads,
            p.scale,
            p.window,
            kLayer,
            kv,
            step.tokens,
            step.tokens,
            static_cast<int64_t>(p.runs.size()),
            std::ranges::count(p.runs, 1, &RunShape::tokens),
            p.splits,
            p.splits,
            partials.data(),
            p.compute,
            p.softcap,
            p.softcap == 0 ? 0 : 2 / p.softcap};
  }

  TestStep step;
  int64_t width;
  Guarded<float> x;
  Guarded<unsigned char> pool;
  Guarded<float> out;
  Guarded<unsigned char> partials;
  cuda::KvPool kv;
};

// Each run and KV head by the oracle of the CPU kernels, over its K and V put side by side.
// out: [tokens, heads, head_dim], m and log_sum: [tokens, heads].
inline ExpectedAttention expect_all(const Problem& p, const Data& d) {
  const DType weights = cuda::in_tensor_cores(d.args(p)) ? d.kv.dtype : DType::kF32;
  ExpectedAttention want;
  const int64_t group = p.heads / p.kv_heads, bytes = dtype_bytes(d.kv.dtype) * p.head_dim;
  const auto scatter = [&](const Expected& from, Expected& to, int64_t width, int64_t first_row,
                           int64_t head) {  // width of a row and head
    to.value.resize(static_cast<size_t>(d.step.tokens * p.heads * width));
    to.bound.resize(to.value.size());
    for (size_t i = 0; i < from.value.size(); ++i) {
      const size_t n = static_cast<size_t>(group * width);
      const size_t at =
          (static_cast<size_t>(first_row) + i / n) * static_cast<size_t>(p.heads * width) +
          static_cast<size_t>(head) * n + i % n;
      to.value[at] = from.value[i];
      to.bound[at] = from.bound[i];
    }
  };
  for (size_t r = 0; r < p.runs.size(); ++r) {
    const cuda::Run& run = d.step.runs.data()[r];
    const int64_t keys = run.first_position + run.tokens;
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      std::vector<unsigned char> k, v;
      for (int64_t j = 0; j < keys; ++j) {
        for (bool value : {false, true}) {
          const unsigned char* from =
              d.pool.data() + d.step.row_at(d.kv, r, kLayer, head, j, value) / p.head_dim * bytes;
          (value ? v : k).insert((value ? v : k).end(), from, from + bytes);
        }
      }
      const float* q = d.x.data() + run.first_row * d.width + (head * group + 1) * p.head_dim;
      const ExpectedAttention e =
          oracle_attention({q,          d.width,
                            run.tokens, group,
                            p.head_dim, run.first_position,
                            0,          p.window,
                            p.scale,    {k.data(), v.data(), nullptr, nullptr, keys},
                            {},         nullptr,
                            nullptr,    nullptr,
                            nullptr,    nullptr,
                            0,          nullptr,
                            nullptr,    p.softcap},
                           d.kv.dtype, DType::kF32, run.tokens > 1 ? weights : DType::kF32);
      scatter(e.out, want.out, p.head_dim, run.first_row, head);
      scatter(e.m, want.m, 1, run.first_row, head);
      scatter(e.log_sum, want.log_sum, 1, run.first_row, head);
    }
  }
  return want;
}

inline Expected expect(const Problem& p, const Data& d) {
  return expect_all(p, d).out;
}

inline std::string label_of(const Problem& p, DType dtype, uint32_t seed) {
  std::ostringstream s;
  s << "attention dtype " << static_cast<int>(dtype) << " heads " << p.heads << "/" << p.kv_heads
    << " head_dim " << p.head_dim << " page " << p.page_tokens << " window " << p.window
    << " splits " << p.splits << " compute " << p.compute << " seed " << seed << " runs";
  for (const RunShape& r : p.runs) s << " " << r.tokens << "@" << r.first_position;
  return s.str();
}

}  // namespace helm::test
