// Products with packed weights. Bytes are random, so that integers are of all sizes; those of
// scales make small finite numbers of any 16-bit format.
#include <cmath>

#include "inputs.h"
#include "kernels/packed.h"
#include "kernels/vec.cuh"

namespace helm::bench {
namespace {

class PackedCase : public Case {
 public:
  PackedCase(std::string what, int64_t rotation_bytes, const Format& format, int64_t tokens,
             int64_t rows, int64_t cols)
      : Case(std::move(what), strips_bytes(format, rows, cols)),
        copies_(std::max<int64_t>(1, rotation_bytes / bytes)),
        w_(bytes * copies_),
        x_(tokens * cols * 4),
        a_(tokens * cuda::ceil_div(cols, kBlockCols) *
           static_cast<int64_t>(sizeof(cuda::QuantBlock))),
        c_(tokens * rows * 4) {
    fill(w_, DType::kF16);
    fill(x_, DType::kF32);
    args_ = {a_.as<cuda::QuantBlock>(),
             tokens,
             {w_.as(), format, rows, cols},
             nullptr,
             false,
             c_.as<float>(),
             rows};
    cuda::quantize({x_.as<float>(), cols, tokens, cols, a_.as<cuda::QuantBlock>()}, nullptr);
    verify();
  }

  void enqueue(cudaStream_t stream) override {
    args_.w.strips = w_.as<uint8_t>() + next_++ % copies_ * bytes;
    cuda::packed_matvec(args_, stream);
  }

 private:
  static int64_t strips_bytes(const Format& format, int64_t rows, int64_t cols) {
    return cuda::ceil_div(rows, kStripRows) * strip_bytes(format, cols);
  }

  // Every 97th row in double precision, of weights expanded to 16 bits and of rounded activations.
  void verify() {
    cuda::packed_matvec(args_, nullptr);
    const auto& w = args_.w;
    const auto c = download<float>(c_.as(), args_.tokens * w.rows);
    const int64_t blocks = cuda::ceil_div(w.cols, kBlockCols);
    const auto a = download<cuda::QuantBlock>(a_.as(), args_.tokens * blocks);
    const DeviceBuffer row(w.cols * 2);
    for (int64_t r = 0; r < w.rows; r += 97) {
      cuda::expand({w, r, 1, row.as(), DType::kF16}, nullptr);
      const auto expanded = download<uint16_t>(row.as(), w.cols);
      for (int64_t t = 0; t < args_.tokens; ++t) {
        double want = 0, size = 0;
        for (int64_t k = 0; k < w.cols; ++k) {
          const auto& block = a[static_cast<size_t>(t * blocks + k / kBlockCols)];
          const int64_t col = k % kBlockCols;
          const int far = block.far_col == col ? block.far * (1 << cuda::kFarShift) : 0;
          const double v = static_cast<double>(block.alpha) * (block.q[col] + far) *
                           static_cast<double>(widened(DType::kF16, expanded.data(), k));
          want += v, size += std::abs(v);
        }
        const double got = c[static_cast<size_t>(t * w.rows + r)];
        require(std::abs(got - want) <= 1e-3 * size, name, t * w.rows + r, got, want);
      }
    }
  }

  int64_t copies_, next_ = 0;
  DeviceBuffer w_, x_, a_, c_;
  cuda::PackedMatvecArgs args_;
};

}  // namespace

std::unique_ptr<Case> packed_case(const std::string& name, const Format& format, int64_t tokens,
                                  int64_t rows, int64_t cols, int64_t rotation_bytes) {
  return std::make_unique<PackedCase>(name, rotation_bytes, format, tokens, rows, cols);
}

}  // namespace helm::bench
