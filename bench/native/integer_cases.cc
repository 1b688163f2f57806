// Products of packed weights with activations in eight bits, over one model's layer shapes.
#include <cmath>
#include <cstring>
#include <random>

#include "cases.h"
#include "cpu/isa.h"
#include "timed.h"

namespace helm::bench {
namespace {

struct Shape {
  int64_t rows, cols;
};
// Qwen3-0.6B: Q, K and V as one matrix, output, gate and up as one, down.
constexpr Shape kShapes[] = {{4096, 1024}, {1024, 2048}, {6144, 1024}, {1024, 3072}};
constexpr int64_t kMaxRows = 6144, kMaxCols = 3072;

}  // namespace

struct PackedWeights {
  explicit PackedWeights(int64_t bytes) : memory(bytes) {}
  probe::Buffer memory;
  std::vector<std::pair<Shape, const std::byte*>> matrices;
};

// Random codes and scales: every 16 bits are two bytes, or an f16 of magnitude 1/256 to 1/64.
std::shared_ptr<PackedWeights> make_packed_weights(const Format& format, const Machine& machine) {
  int64_t layer_bytes = 0;
  for (const Shape& s : kShapes) layer_bytes += format_bytes(format, s.rows, s.cols);
  auto w = std::make_shared<PackedWeights>(machine.layers * layer_bytes);
  std::mt19937 rng(1);
  std::vector<uint16_t> noise(65521);
  for (uint16_t& v : noise) v = static_cast<uint16_t>((rng() & 0x87ff) | 0x1c00);
  for (int64_t i = 0; i < w->memory.bytes(); i += 2 * 65521) {
    const auto n = std::min<int64_t>(2 * 65521, w->memory.bytes() - i);
    std::memcpy(w->memory.data() + i, noise.data(), static_cast<size_t>(n));
  }
  const auto* p = reinterpret_cast<const std::byte*>(w->memory.data());
  for (int layer = 0; layer < machine.layers; ++layer) {
    for (const Shape& s : kShapes) {
      w->matrices.emplace_back(s, p);
      p += format_bytes(format, s.rows, s.cols);
    }
  }
  return w;
}

namespace {

class IntegerMatmul : public Case {
 public:
  IntegerMatmul(const cpu::IntegerTable& table, const Format& format, int64_t tokens,
                std::shared_ptr<PackedWeights> weights, const Machine& machine)
      : table_(table),
        format_(format),
        tokens_(tokens),
        weights_(std::move(weights)),
        machine_(machine),
        x_(static_cast<size_t>(tokens * kMaxCols)),
        quantised_(machine.threads * row_bytes()),
        c_(tokens * kMaxRows * 4) {
    std::mt19937 rng(2);
    std::normal_distribution<float> value;
    for (float& x : x_) x = value(rng);
    name = "integer tokens " + std::to_string(tokens);
    tier = table.name;
    dtype = format_name(format);
    unit = few() ? Unit::kBytes : Unit::kFlops;
    // Prefill passes are long and never memory-bound: one layer of weights is enough.
    used_ = few() ? weights_->matrices.size() : std::size(kShapes);
    for (size_t i = 0; i < used_; ++i) {
      const Shape s = weights_->matrices[i].first;
      work += static_cast<double>(few() ? read_bytes(format, s.rows, s.cols)
                                        : 2 * tokens * s.rows * s.cols);
    }
  }

  // The bits of the scalar table, and a few values near a sum of floats.
  void verify() override {
    std::vector<float> row(kMaxCols);
    for (size_t i = 0; i < std::size(kShapes); ++i) {
      const auto [shape, w] = weights_->matrices[i];
      quantise(shape, 0, 0, tokens_);
      multiply(*cpu::integer_scalar(), i, 0, shape.rows, 0);
      const std::vector<float> want(c(), c() + tokens_ * kMaxRows);
      multiply(table_, i, 0, shape.rows, 0);
      if (std::memcmp(want.data(), c(), want.size() * sizeof(float)) != 0) {
        throw Error(ErrorKind::kInvalid, "[bench] " + tier + " " + name + " " + dtype +
                                             " differs from the scalar product");
      }
      for (int64_t n = 0; n < 20; ++n) check_value(shape, w, n % tokens_, n * 977 % shape.rows);
    }
  }

  double pass_s() override {
    return timed(machine_.threads, [&](int t, std::barrier<>& sync) {
      for (size_t i = 0; i < used_; ++i) {
        const Shape shape = weights_->matrices[i].first;
        const int64_t n = machine_.threads;
        if (few()) {
          quantise(shape, t, 0, tokens_);
        } else {
          quantise(shape, 0, tokens_ * t / n, tokens_ * (t + 1) / n);
          sync.arrive_and_wait();
        }
        const int64_t strips = shape.rows / kStripRows;
        multiply(table_, i, strips * t / n * kStripRows, strips * (t + 1) / n * kStripRows,
                 few() ? t : 0);
        if (i + 1 < used_) sync.arrive_and_wait();
      }
    });
  }

 private:
  bool few() const { return tokens_ <= cpu::kDecodeTokens; }
  float* c() { return reinterpret_cast<float*>(c_.data()); }
  int64_t row_bytes() const {
    return tokens_ * cpu::quant_blocks(kMaxCols) * static_cast<int64_t>(sizeof(cpu::QuantBlock));
  }
  cpu::QuantBlock* quantised(int thread) {
    return reinterpret_cast<cpu::QuantBlock*>(quantised_.data() + thread * row_bytes());
  }
  void quantise(Shape shape, int thread, int64_t begin, int64_t end) {
    table_.quantize_rows({x_.data() + begin * kMaxCols, kMaxCols, end - begin, shape.cols,
                          quantised(thread) + begin * cpu::quant_blocks(shape.cols)});
  }
  void multiply(const cpu::IntegerTable& table, size_t index, int64_t begin, int64_t end,
                int thread) {
    const auto [shape, w] = weights_->matrices[index];
    cpu::QuantArgs args{};
    args.a = quantised(thread), args.tokens = tokens_;
    args.strips = w + begin / kStripRows * strip_bytes(format_, shape.cols);
    args.format = format_, args.rows = end - begin, args.cols = shape.cols;
    args.c = c() + begin, args.c_stride = kMaxRows;
    table.product(args);
  }
  void check_value(Shape shape, const std::byte* w, int64_t t, int64_t r) {
    std::vector<float> row(static_cast<size_t>(shape.cols));
    table_.read_row(format_, w + r / kStripRows * strip_bytes(format_, shape.cols),
                    static_cast<int>(r % kStripRows), shape.cols, row.data());
    double want = 0, size = 0;
    for (int64_t k = 0; k < shape.cols; ++k) {
      const double v = static_cast<double>(row[static_cast<size_t>(k)]) *
                       x_[static_cast<size_t>(t * kMaxCols + k)];
      want += v, size += v * v;
    }
    const double got = c()[t * kMaxRows + r];
    // Activations are rounded to 1/254 of the largest of 32, some 2.5 deviations.
    if (std::abs(got - want) <= 0.05 * std::sqrt(size)) return;
    throw Error(ErrorKind::kInvalid, "[bench] " + tier + " " + name + " " + dtype + " gives " +
                                         std::to_string(got) + ", expected " +
                                         std::to_string(want));
  }

  const cpu::IntegerTable& table_;
  Format format_;
  int64_t tokens_;
  std::shared_ptr<PackedWeights> weights_;
  Machine machine_;
  std::vector<float> x_;
  probe::Buffer quantised_, c_;
  size_t used_ = 0;
};

}  // namespace

std::unique_ptr<Case> integer_case(const cpu::IntegerTable& table, const Format& format,
                                   int64_t tokens, std::shared_ptr<PackedWeights> weights,
                                   const Machine& machine) {
  return std::make_unique<IntegerMatmul>(table, format, tokens, std::move(weights), machine);
}

}  // namespace helm::bench
