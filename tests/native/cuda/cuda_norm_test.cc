// Norms, rotary embedding and the append to pages under emulation, against double precision.
#include <cmath>
#include <cstring>

#include "cuda_step.h"

namespace helm::test {
namespace {

void check_norm(int64_t rows, int64_t groups, int64_t n, bool rms, bool in_place, Fill fill,
                uint32_t seed) {
  const int64_t stride = groups * n + 3;
  const Guarded<float> x(random_floats((rows - 1) * stride + groups * n, seed, fill));
  const Guarded<float> y(random_floats(x.size(), seed + 1));
  const Guarded<float> weight(random_floats(n, seed + 2)), bias(random_floats(n, seed + 3));
  const float* b = !rms && seed % 2 ? bias.data() : nullptr;
  float* out = in_place ? x.data() : y.data();
  const float plus = seed % 5 ? 0.0f : 1.0f;
  const bool accumulate = seed % 3 == 1;
  const Expected want = oracle_norm(
      {x.data(), stride, out, stride, rows, groups, n, weight.data(), b, 1e-6f, plus, accumulate},
      rms);
  cuda::NormArgs args{!rms,   x.data(), stride,        out, stride, rows,
                      groups, n,        weight.data(), b,   1e-6f};
  args.weight_plus = plus;
  args.accumulate = accumulate;
  cuda::norm(args, kOverlapping);
  const std::string label = (rms ? "rms norm n " : "layer norm n ") + std::to_string(n) + " rows " +
                            std::to_string(rows) + " seed " + std::to_string(seed);
  finish_kernels(label);
  std::vector<float> got;
  for (int64_t i = 0; i < rows * groups * n; ++i) {
    got.push_back(out[i / (groups * n) * stride + i % (groups * n)]);
  }
  CHECK(compare(got, want.value, want.bound, label) == "");
  CHECK_MESSAGE((x.intact() && y.intact() && weight.intact() && bias.intact()), label);
}

// Heads of one token rotated by double arithmetic, from the angle that is rounded to f32.
// bound: the rounding of cos, sin and the sums.
void rotate(std::vector<double>* x, std::vector<double>* bound, const cuda::RopeArgs& rope,
            int32_t position) {
  const size_t half = static_cast<size_t>(rope.rotary / 2);
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position) * rope.inv_freq[i];
    const double c = std::cos(angle) * rope.factor, s = std::sin(angle) * rope.factor;
    const size_t first = rope.neighbours ? 2 * i : i;
    const size_t second = rope.neighbours ? 2 * i + 1 : i + half;
    const double a = (*x)[first], b = (*x)[second];
    (*x)[first] = a * c - b * s;
    (*x)[second] = b * c + a * s;
    (*bound)[first] = (*bound)[second] = 4 * kEps * rope.factor * (std::abs(a) + std::abs(b));
  }
}

struct Problem {
  std::vector<RunShape> runs;
  int64_t q_heads, kv_heads, head_dim, rotary, page_tokens;
};

// Rope of q and k heads and the append, fused or one after the other.
void check_append(const Problem& p, DType dtype, bool fused, uint32_t seed) {
  const int32_t layers = 2;
  const TestStep step(p.runs, p.page_tokens, layers, p.kv_heads, seed);
  const int64_t heads = p.q_heads + 2 * p.kv_heads, width = heads * p.head_dim + 5, offset = 2;
  const Guarded<float> x(random_floats(step.tokens * width, seed + 1));
  const Guarded<float> inv_freq(random_floats(p.rotary / 2, seed + 2));
  const std::vector<float> before = x.copy();
  const Guarded<unsigned char> pool(step.pages.size() * 2 * p.kv_heads * p.page_tokens *
                                    p.head_dim * dtype_bytes(dtype));
  std::memset(pool.data(), 0xff, static_cast<size_t>(pool.size()));
  const cuda::KvPool kv{pool.data(), dtype, p.page_tokens, p.kv_heads, p.head_dim};
  const cuda::RopeArgs rope{x.data(),    width,        offset,          p.q_heads + p.kv_heads,
                            p.head_dim,  p.rotary,     inv_freq.data(), 1.25f,
                            step.tokens, seed % 2 == 1};
  const int64_t k_offset = offset + p.q_heads * p.head_dim;
  const int64_t v_offset = k_offset + p.kv_heads * p.head_dim;
  if (!fused) cuda::rope(rope, step.tables, kOverlapping);
  cuda::append({x.data(), width, k_offset, v_offset, 1, kv, step.tokens, fused ? &rope : nullptr},
               step.tables, kOverlapping);
  const std::string label = "append dtype " + std::to_string(static_cast<int>(dtype)) +
                            " head_dim " + std::to_string(p.head_dim) + " rotary " +
                            std::to_string(p.rotary) + " seed " + std::to_string(seed);
  finish_kernels(label);

  const double narrowing = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  std::vector<float> got;
  Expected want;
  std::vector<bool> written(static_cast<size_t>(pool.size() / dtype_bytes(dtype)));
  for (size_t r = 0; r < p.runs.size(); ++r) {
    for (int64_t t = 0; t < p.runs[r].tokens; ++t) {
      const int64_t row = step.runs.data()[r].first_row + t;
      const int32_t position = p.runs[r].first_position + static_cast<int32_t>(t);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t from = row * width + offset + h * p.head_dim;
        std::vector<double> value(before.begin() + from, before.begin() + from + p.head_dim);
        std::vector<double> bound(value.size(), 0.0);
        if (h < p.q_heads + p.kv_heads) rotate(&value, &bound, rope, position);
        const bool cached = h >= p.q_heads, is_value = h >= p.q_heads + p.kv_heads;
        const int64_t at =
            cached ? step.row_at(kv, r, 1, (h - p.q_heads) % p.kv_heads, position, is_value) : 0;
        for (size_t d = 0; d < value.size(); ++d) {
          const int64_t i = at + static_cast<int64_t>(d);
          if (cached) written[static_cast<size_t>(i)] = true;
          got.push_back(cached ? static_cast<float>(decode(dtype, pool.data(), i))
                               : x.data()[from + static_cast<int64_t>(d)]);
          want.value.push_back(value[d]);
          want.bound.push_back(bound[d] + (cached ? narrowing * std::abs(value[d]) + 1e-7 : 0));
        }
      }
    }
  }
  CHECK(compare(got, want.value, want.bound, label) == "");
  int64_t overwritten = 0;
  for (size_t i = 0; i < written.size(); ++i) {
    overwritten += !written[i] && !std::isnan(decode(dtype, pool.data(), static_cast<int64_t>(i)));
  }
  CHECK_MESSAGE(overwritten == 0, label);
  CHECK_MESSAGE((x.intact() && pool.intact()), label);
}

}  // namespace

TEST_CASE("cuda norms: ragged sizes, in place, hard inputs") {
  uint32_t seed = 5000;
  for (int64_t n : {1, 2, 31, 32, 33, 64, 127, 128, 1000, 1023, 1024, 1025, 5000}) {
    for (bool rms : {false, true}) {
      for (Fill fill : kFills) check_norm(3, 2, n, rms, seed % 3 == 0, fill, seed), ++seed;
    }
  }
  for (int64_t rows : {1, 2, 9}) check_norm(rows, 5, 128, true, true, Fill::kSigned, seed++);
}

TEST_CASE("cuda norms: the bits of a row do not depend on the number of rows") {
  for (int64_t n : {100, 3000}) {
    const int64_t rows = 5;
    const Guarded<float> x(random_floats(rows * n, 5900)), weight(random_floats(n, 5901));
    const Guarded<float> together(rows * n), alone(rows * n);
    cuda::norm({false, x.data(), n, together.data(), n, rows, 1, n, weight.data(), nullptr, 1e-6f},
               kOverlapping);
    for (int64_t r = 0; r < rows; ++r) {
      cuda::norm({false, x.data() + r * n, n, alone.data() + r * n, n, 1, 1, n, weight.data(),
                  nullptr, 1e-6f},
                 kOverlapping);
    }
    finish_kernels("norm bits");
    CHECK(compare_bits(alone.copy(), together.copy(), "norm bits") == "");
  }
}

TEST_CASE("cuda norms: the copy for a product has the bits of narrowing the result") {
  uint32_t seed = 5950;
  for (int64_t n : {33, 1030}) {
    for (bool layer_norm : {false, true}) {
      for (DType dtype : {DType::kF16, DType::kBF16}) {
        const int64_t rows = 3, groups = 2, width = groups * n, stride = width + 3;
        const Guarded<float> x(random_floats(rows * stride, ++seed, Fill::kLarge));
        const Guarded<float> weight(random_floats(n, ++seed)), bias(random_floats(n, ++seed));
        const Guarded<float> y(rows * stride), untouched(rows * stride), plain(rows * stride);
        const Guarded<uint16_t> want(rows * width), beside(rows * width), alone(rows * width);
        cuda::NormArgs args{layer_norm, x.data(), stride,        plain.data(), stride, rows,
                            groups,     n,        weight.data(), bias.data(),  1e-6f};
        cuda::norm(args, kOverlapping);
        cuda::narrow(plain.data(), stride, rows, width, dtype, want.data(), kOverlapping);
        args.y = y.data(), args.copy = {beside.data(), dtype};
        cuda::norm(args, kOverlapping);
        args.y = nullptr, args.copy = {alone.data(), dtype};
        cuda::norm(args, kOverlapping);
        finish_kernels("norm and copy");
        CHECK(compare_bits(y.copy(), plain.copy(), "norm beside its copy") == "");
        CHECK(beside.copy() == want.copy());
        CHECK(alone.copy() == want.copy());
        CHECK((y.intact() && beside.intact() && alone.intact()));
      }
    }
  }
}

TEST_CASE("cuda rope and append: apart and fused, partial rotation, ragged pages, long positions") {
  uint32_t seed = 6000;
  for (DType dtype : kAllTypes) {
    for (bool fused : {false, true}) {
      check_append({{{1, 0}}, 2, 1, 64, 64, 16}, dtype, fused, seed++);
      check_append({{{3, 0}, {1, 40}, {20, 14}}, 4, 2, 16, 16, 16}, dtype, fused, seed++);
      check_append({{{5, 3}, {1, 7}}, 3, 3, 7, 2, 5}, dtype, fused, seed++);
      check_append({{{2, 510}}, 16, 2, 80, 20, 512}, dtype, fused, seed++);
      check_append({{{2, 2047}}, 1, 1, 128, 128, 64}, dtype, fused, seed++);
    }
  }
}

TEST_CASE("cuda rope: keeps what it does not rotate, at positions of long contexts") {
  const int64_t tokens = 2, heads = 3, head_dim = 10, rotary = 6, width = 40, offset = 4;
  for (int32_t position : {1, 4095, 131071, 1000000}) {
    const Guarded<float> x(random_floats(tokens * width, 6500));
    const Guarded<float> inv_freq(random_floats(rotary / 2, 6501));
    const Guarded<int32_t> positions(std::vector<int32_t>{position, position + 1});
    const std::vector<float> before = x.copy();
    Expected want{{before.begin(), before.end()}, std::vector<double>(before.size(), 0.0)};
    const cuda::RopeArgs rope{x.data(), width,           offset, heads,  head_dim,
                              rotary,   inv_freq.data(), 1.0f,   tokens, position % 2 == 1};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const auto at = static_cast<ptrdiff_t>(t * width + offset + h * head_dim);
        std::vector<double> value(before.begin() + at, before.begin() + at + rotary);
        std::vector<double> bound(value.size(), 0.0);
        rotate(&value, &bound, rope, positions.data()[t]);
        std::copy(value.begin(), value.end(), want.value.begin() + at);
        std::copy(bound.begin(), bound.end(), want.bound.begin() + at);
      }
    }
    cuda::StepTables step{};
    step.positions = positions.data();
    cuda::rope(rope, step, kOverlapping);
    finish_kernels("rope");
    CHECK(compare(x.copy(), want.value, want.bound, "rope") == "");
    CHECK(x.intact());
  }
}

}  // namespace helm::test
