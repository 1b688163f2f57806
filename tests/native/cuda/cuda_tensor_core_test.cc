// The emulation's products of small matrices, loads of their fragments and copies that run beside a
// warp, against naive loops over whole matrices; and that each kind of mistake shows.
#include "tensor_core.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "launch.h"
#include "oracle.h"
#include "support/check.h"

namespace helm::test {
namespace {

using cuda::dynamic_shared;
using cuda::launch;

constexpr int kM = 16, kN = 8, kK = 16;  // of c += a b, a [kM, kK], b [kK, kN]

class Generation {
 public:
  Generation(int major, int minor) { cuda_emulation::set_compute_capability(major, minor); }
  ~Generation() { cuda_emulation::set_compute_capability(7, 5); }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;
};

// Runs a kernel of one block to its end and returns the fault, or "".
template <class... Params, class... Args>
std::string run(void (*kernel)(Params...), unsigned threads, size_t shared, Args... args) {
  launch(kernel, 1, threads, shared, nullptr, args...);
  const cudaError_t error = cudaDeviceSynchronize();
  const std::string fault = cuda_emulation::fault();
  CHECK((error == cudaSuccess) == fault.empty());
  cuda_emulation::clear_fault();
  return fault;
}

unsigned both(const uint16_t* m, int row, int column, int row_step, int column_step, int columns) {
  return m[row * columns + column] |
         static_cast<unsigned>(m[(row + row_step) * columns + column + column_step]) << 16;
}

// Fragments straight from the matrices, as the PTX ISA numbers them.
void product_kernel(const uint16_t* a, const uint16_t* b, float* c, bool bf16) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, i = lane % 4;
  unsigned fa[4];
  for (int r = 0; r < 4; ++r) fa[r] = both(a, g + r % 2 * 8, 2 * i + r / 2 * 8, 0, 1, kK);
  const unsigned b0 = both(b, 2 * i, g, 1, 0, kN), b1 = both(b, 2 * i + 8, g, 1, 0, kN);
  float fc[4];
  const auto at = [&](int r) { return (g + r / 2 * 8) * kN + 2 * i + r % 2; };
  for (int r = 0; r < 4; ++r) fc[r] = c[at(r)];
  if (bf16) {
    cuda::multiply_bf16(fc, fa, b0, b1);
  } else {
    cuda::multiply_f16(fc, fa, b0, b1);
  }
  for (int r = 0; r < 4; ++r) c[at(r)] = fc[r];
}

// Four matrices [8, 8] behind one another in shared memory; out: [4, 32] words.
void load_kernel(const uint16_t* from, unsigned* out, bool transposed) {
  auto* shared = dynamic_shared<uint16_t>();
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < 4 * 64; i += 32) shared[i] = from[i];
  __syncwarp();
  unsigned to[4];
  if (transposed) {
    cuda::load_matrices_transposed(to, shared + lane * 8);
  } else {
    cuda::load_matrices(to, shared + lane * 8);
  }
  for (unsigned i = 0; i < 4; ++i) out[i * 32 + lane] = to[i];
}
void unaligned_load_kernel(unsigned* out) {
  unsigned to[4];
  cuda::load_matrices(to, dynamic_shared<uint16_t>() + 4);
  *out = to[0];
}
void half_warp_kernel(float* c) {
  const unsigned a[4] = {};
  float fc[4] = {};
  cuda::multiply_f16(fc, a, 0, 0);
  c[0] = fc[0];
}

// seen[0]: shared memory once the copy has begun; [1]: when one group may be on its way; [2]: none
void copy_kernel(const uint4* from, uint4* seen) {
  auto* shared = dynamic_shared<uint4>();
  shared[0] = shared[1] = uint4{1, 1, 1, 1};
  cuda::copy_async(shared, from);
  cuda::commit_copies();
  cuda::copy_async(shared + 1, from + 1);
  cuda::commit_copies();
  seen[0] = shared[0];
  cuda::await_copies<1>();
  seen[1] = shared[0];
  seen[2] = shared[1];
  cuda::await_copies<0>();
  seen[3] = shared[1];
  cuda::copy_async(shared, from + 1);  // in no group
  cuda::await_copies<0>();
  seen[4] = shared[0];
}
void unaligned_copy_kernel(const char* from) {
  cuda::copy_async(dynamic_shared<char>(), from + 8);
}

void check_product(DType dtype, uint32_t seed) {
  const auto a = random_floats(kM * kK, seed), b = random_floats(kK * kN, seed + 1);
  const auto stored_a = encode(dtype, a), stored_b = encode(dtype, b);
  const auto before = random_floats(kM * kN, seed + 2);
  std::vector<float> c = before;
  CHECK(run(product_kernel, 32, 0, reinterpret_cast<const uint16_t*>(stored_a.data()),
            reinterpret_cast<const uint16_t*>(stored_b.data()), c.data(),
            dtype == DType::kBF16) == "");
  std::vector<double> want, bound;
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      double sum = static_cast<double>(before[static_cast<size_t>(m * kN + n)]);
      double size = std::abs(sum);
      for (int k = 0; k < kK; ++k) {
        const double v =
            decode(dtype, stored_a.data(), m * kK + k) * decode(dtype, stored_b.data(), k * kN + n);
        sum += v, size += std::abs(v);
      }
      want.push_back(sum), bound.push_back((kK + 1) * kEps * size);
    }
  }
  CHECK(compare(c, want, bound, "product of fragments") == "");
}

}  // namespace

TEST_CASE("tensor cores: fragments multiply as matrices do") {
  for (uint32_t seed = 1; seed < 5; ++seed) check_product(DType::kF16, seed);
  const Generation ampere(8, 0);
  for (uint32_t seed = 5; seed < 9; ++seed) {
    check_product(DType::kF16, seed);
    check_product(DType::kBF16, seed);
  }
}

TEST_CASE("tensor cores: what they cannot do is a fault") {
  std::vector<float> c(kM * kN);
  std::vector<uint16_t> ab(kM * kK);
  const uint16_t* const p = ab.data();
  CHECK(run(product_kernel, 32, 0, p, p, c.data(), true).find("older than sm_80") !=
        std::string::npos);
  CHECK(run(half_warp_kernel, 16, 0, c.data()).find("does not exist") != std::string::npos);
  unsigned word = 0;
  CHECK(run(unaligned_load_kernel, 32, 64, &word).find("misaligned") != std::string::npos);
}

TEST_CASE("tensor cores: each lane loads its part of four matrices, of rows or of columns") {
  std::vector<uint16_t> matrices(4 * 64);
  for (size_t i = 0; i < matrices.size(); ++i) matrices[i] = static_cast<uint16_t>(i * 7 + 3);
  for (const bool transposed : {false, true}) {
    std::vector<unsigned> out(4 * 32);
    CHECK(run(load_kernel, 32, 4 * 64 * 2, static_cast<const uint16_t*>(matrices.data()),
              out.data(), transposed) == "");
    for (size_t i = 0; i < 4; ++i) {
      for (size_t lane = 0; lane < 32; ++lane) {
        for (size_t h = 0; h < 2; ++h) {
          const size_t major = lane / 4, minor = lane % 4 * 2 + h;
          const size_t at = transposed ? minor * 8 + major : major * 8 + minor;
          CHECK((out[i * 32 + lane] >> 16 * h & 0xffff) == matrices[i * 64 + at]);
        }
      }
    }
  }
}

TEST_CASE("tensor cores: pairs are rounded to nearest even, the first in the lower half") {
  for (const float x : {1.0f, -0.3f, 1e-6f, 1.00390625f, 3.14159f}) {
    const float y = 2.5f - x;
    CHECK(cuda::pair_f16(x, y) == (encode_f16(x) | static_cast<unsigned>(encode_f16(y)) << 16));
    CHECK(cuda::pair_bf16(x, y) == (encode_bf16(x) | static_cast<unsigned>(encode_bf16(y)) << 16));
  }
}

TEST_CASE(
    "copies beside a warp: bytes are there once awaited, and what was there is lost at once") {
  alignas(16) uint4 from[2] = {{2, 3, 4, 5}, {6, 7, 8, 9}};
  std::vector<uint4> seen(5);
  const auto is = [&](size_t i, const uint4& want) {
    return std::memcmp(&seen[i], &want, sizeof want) == 0;
  };
  {
    const Generation ampere(8, 0);
    CHECK(run(copy_kernel, 1, 32, static_cast<const uint4*>(from), seen.data()) == "");
    const uint4 lost = {~0u, ~0u, ~0u, ~0u};
    CHECK(is(0, lost));
    CHECK(is(1, from[0]));
    CHECK(is(2, lost));
    CHECK(is(3, from[1]));
    CHECK(is(4, lost));
  }
  CHECK(run(copy_kernel, 1, 32, static_cast<const uint4*>(from), seen.data()) == "");
  CHECK(is(0, from[0]));
  CHECK(run(unaligned_copy_kernel, 1, 16, reinterpret_cast<const char*>(from)).find("misaligned") !=
        std::string::npos);
}

}  // namespace helm::test
