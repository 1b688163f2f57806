// Matrix products over one model's layer shapes, and prefill attention over one span.
#include "cases.h"

#include <cmath>
#include <cstring>
#include <random>

#include "cpu/compression.h"
#include "cpu/isa.h"
#include "probe/ceiling.h"
#include "timed.h"

namespace helm::bench {
namespace {

struct Shape {
  int64_t rows, cols;
};
// Qwen3-0.6B: Q, K and V as one matrix, output, gate and up as one, down.
constexpr Shape kShapes[] = {{4096, 1024}, {1024, 2048}, {6144, 1024}, {1024, 3072}};
constexpr int64_t kMaxRows = 6144, kMaxCols = 3072;
constexpr int64_t kHeads = 8, kGroup = 2, kHeadDim = 128;

// Random values of +-1/16 in dtype, made from a block that repeats at an odd distance.
void fill(const cpu::KernelTable& table, DType dtype, char* data, int64_t n, uint32_t seed) {
  constexpr int64_t kBlock = 65521;
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> value(-1.0f / 16, 1.0f / 16);
  std::vector<float> block(kBlock);
  for (float& v : block) v = value(rng);
  for (int64_t i = 0; i < n; i += kBlock) {
    table.narrow[static_cast<int>(dtype)](block.data(), data + i * dtype_bytes(dtype),
                                          std::min(kBlock, n - i));
  }
}

void require_near(double got, double want, double bound, const std::string& what) {
  if (std::abs(got - want) <= bound) return;
  throw Error(ErrorKind::kInvalid, "[bench] " + what + " gives " + std::to_string(got) +
                                       ", expected " + std::to_string(want));
}

std::vector<float> widened(const cpu::KernelTable& table, DType dtype, const char* p, int64_t n) {
  std::vector<float> out(static_cast<size_t>(n));
  table.widen[static_cast<int>(dtype)](p, out.data(), n);
  return out;
}

}  // namespace

struct Weights {
  Weights(int64_t bytes, probe::Pages kind) : pages(kind), memory(bytes, kind) {}
  probe::Pages pages;
  probe::Buffer memory;
  std::vector<std::pair<Shape, const char*>> matrices;
  bool compressed = false;

  // Of the rows that one pass of a matrix reads.
  int64_t bytes(DType dtype, Shape s) const {
    if (compressed) return cpu::CompressedMatrix::read_bytes(s.rows, s.cols);
    return s.rows * s.cols * dtype_bytes(dtype);
  }
};

std::shared_ptr<Weights> make_weights(DType dtype, const Machine& machine, probe::Pages pages) {
  int64_t elements = 0;
  for (const Shape& s : kShapes) elements += s.rows * s.cols;
  auto w = std::make_shared<Weights>(machine.layers * elements * dtype_bytes(dtype), pages);
  fill(cpu::select_kernels(), dtype, w->memory.data(), machine.layers * elements, 1);
  const char* p = w->memory.data();
  for (int layer = 0; layer < machine.layers; ++layer) {
    for (const Shape& s : kShapes) {
      w->matrices.emplace_back(s, p);
      p += s.rows * s.cols * dtype_bytes(dtype);
    }
  }
  return w;
}

std::shared_ptr<Weights> make_compressed_weights(const Machine& machine) {
  const auto plain = make_weights(DType::kBF16, {machine.threads, 1}, probe::Pages::kHuge);
  int64_t bytes = 0;
  const auto place_of = [&bytes](Shape s) {
    const int64_t at = bytes;
    bytes = (bytes + cpu::CompressedMatrix::bytes(s.rows, s.cols) + 63) / 64 * 64;
    return at;
  };
  for (const Shape& s : kShapes) place_of(s);
  auto w = std::make_shared<Weights>(machine.layers * bytes, probe::Pages::kHuge);
  w->compressed = true;
  bytes = 0;
  for (int layer = 0; layer < machine.layers; ++layer) {
    for (const auto& [s, from] : plain->matrices) {
      char* to = w->memory.data() + place_of(s);
      cpu::Compression compression(reinterpret_cast<std::byte*>(to), s.rows, s.cols);
      for (int64_t r = 0; r < s.rows; ++r) {
        const auto* row = reinterpret_cast<const uint16_t*>(from) + r * s.cols;
        if (!compression.put(cpu::select_kernels(), r, row)) {
          throw Error(ErrorKind::kInvalid, "[bench] random weights do not compress");
        }
      }
      w->matrices.emplace_back(s, to);
    }
  }
  return w;
}

namespace {

class Matmul : public Case {
 public:
  Matmul(const cpu::KernelTable& table, DType type, int64_t tokens,
         std::shared_ptr<Weights> weights, const Machine& machine)
      : table_(table),
        dtype_(type),
        tokens_(tokens),
        weights_(std::move(weights)),
        machine_(machine),
        a_(tokens * kMaxCols * 4),
        packed_(cpu::packed_bytes(tokens, kMaxCols)),
        c_(tokens * kMaxRows * 4),
        scratch_bytes_((table.scratch_bytes(64) + 4095) / 4096 * 4096),
        scratch_(scratch_bytes_ * machine.threads) {
    fill(table, DType::kF32, a_.data(), tokens * kMaxCols, 2);
    name = "matmul tokens " + std::to_string(tokens);
    if (weights_->pages == probe::Pages::kSmall) name += " small pages";
    if (weights_->compressed) name += " compressed";
    tier = table.name;
    dtype = dtype_name(type);
    unit = tokens <= 8 ? Unit::kBytes : Unit::kFlops;
    // Prefill passes are long and never memory-bound: one layer of weights is enough.
    used_ = tokens <= 8 ? weights_->matrices.size() : 4;
    for (size_t i = 0; i < used_; ++i) {
      const Shape s = weights_->matrices[i].first;
      work += static_cast<double>(tokens <= 8 ? weights_->bytes(type, s)
                                              : 2 * tokens * s.rows * s.cols);
    }
  }

  void verify() override {
    for (size_t i = 0; i < 4; ++i) {
      pack(i, 0, 1);
      run(i, 0, 1);
      const auto [shape, w] = weights_->matrices[i];
      for (int64_t n = 0; n < 50; ++n) {
        const int64_t t = n % tokens_, r = n * 977 % shape.rows;
        const auto row = weights_row(shape, w, r);
        const auto a =
            rounded(reinterpret_cast<const float*>(a_.data()) + t * kMaxCols, shape.cols);
        double want = 0, size = 0;
        for (int64_t k = 0; k < shape.cols; ++k) {
          const double v =
              static_cast<double>(row[static_cast<size_t>(k)]) * a[static_cast<size_t>(k)];
          want += v, size += std::abs(v);
        }
        require_near(reinterpret_cast<const float*>(c_.data())[t * kMaxRows + r], want,
                     1.2e-7 * static_cast<double>(shape.cols) * size, tier + " " + name);
      }
    }
  }

  double pass_s() override {
    return timed(machine_.threads, [&](int t, std::barrier<>& sync) {
      for (size_t i = 0; i < used_; ++i) {
        if (pack(i, t, machine_.threads)) sync.arrive_and_wait();
        run(i, t, machine_.threads);
        if (i + 1 < used_) sync.arrive_and_wait();
      }
    });
  }

 private:
  // The thread's share of the inputs; false where the product reads them as they are.
  bool pack(size_t index, int thread, int threads) {
    const int64_t tiles = cpu::tiles_to_pack(table_, dtype_, tokens_);
    const int64_t cols = weights_->matrices[index].first.cols;
    for (int64_t tile = tiles * thread / threads; tile < tiles * (thread + 1) / threads; ++tile) {
      table_.pack[static_cast<int>(dtype_)](
          {reinterpret_cast<const float*>(a_.data()), kMaxCols, tokens_, cols, packed_.data()},
          tile);
    }
    return tiles > 0;
  }

  void run(size_t index, int thread, int threads) {
    const auto [shape, w] = weights_->matrices[index];
    const int64_t r0 = shape.rows * thread / threads, r1 = shape.rows * (thread + 1) / threads;
    const cpu::MatmulArgs args{reinterpret_cast<const float*>(a_.data()),
                               kMaxCols,
                               tokens_,
                               w + r0 * shape.cols * dtype_bytes(dtype_),
                               r1 - r0,
                               shape.cols,
                               nullptr,
                               false,
                               reinterpret_cast<float*>(c_.data()) + r0,
                               kMaxRows,
                               scratch_.data() + thread * scratch_bytes_,
                               packed_.data()};
    if (weights_->compressed) return table_.matmul_compressed(args, compressed(shape, w).from(r0));
    table_.matmul[static_cast<int>(dtype_)](args);
  }

  static cpu::CompressedMatrix compressed(Shape s, const char* w) {
    return cpu::CompressedMatrix::at(reinterpret_cast<const std::byte*>(w), s.rows, s.cols);
  }

  std::vector<float> weights_row(Shape s, const char* w, int64_t r) const {
    if (!weights_->compressed) {
      return widened(table_, dtype_, w + r * s.cols * dtype_bytes(dtype_), s.cols);
    }
    std::vector<uint16_t> plain(static_cast<size_t>(s.cols));
    cpu::read_compressed(table_, compressed(s, w), r, 0, s.cols, plain.data());
    return widened(table_, dtype_, reinterpret_cast<const char*>(plain.data()), s.cols);
  }

  // Inputs as the kernel rounds them.
  std::vector<float> rounded(const float* a, int64_t n) const {
    const DType to = table_.activations[static_cast<int>(dtype_)];
    std::vector<char> stored(static_cast<size_t>(n * dtype_bytes(to)));
    table_.narrow[static_cast<int>(to)](a, stored.data(), n);
    return widened(table_, to, stored.data(), n);
  }

  const cpu::KernelTable& table_;
  DType dtype_;
  int64_t tokens_;
  std::shared_ptr<Weights> weights_;
  Machine machine_;
  probe::Buffer a_, packed_, c_;
  int64_t scratch_bytes_;
  probe::Buffer scratch_;
  size_t used_ = 0;
};

class PrefillAttention : public Case {
 public:
  PrefillAttention(const cpu::KernelTable& table, DType type, int64_t queries,
                   const Machine& machine)
      : table_(table),
        dtype_(type),
        queries_(queries),
        machine_(machine),
        kv_(2 * kHeads * queries * kHeadDim * dtype_bytes(type)),
        q_(queries * kHeads * kGroup * kHeadDim * 4),
        out_(machine.threads * queries * kGroup * (kHeadDim + 2) * 4),
        scratch_bytes_((table.scratch_bytes(kHeadDim) + 4095) / 4096 * 4096),
        scratch_(scratch_bytes_ * machine.threads) {
    fill(table, type, kv_.data(), kv_.bytes() / dtype_bytes(type), 3);
    fill(table, DType::kF32, q_.data(), q_.bytes() / 4, 4);
    name = "prefill attention queries " + std::to_string(queries);
    tier = table.name;
    dtype = dtype_name(type);
    unit = Unit::kFlops;
    // Causal: half of the pairs, two products of head_dim each.
    work = 4.0 * kHeads * kGroup * kHeadDim *
           (static_cast<double>(queries) * static_cast<double>(queries + 1) / 2);
  }

  void verify() override {
    run(0, 0);
    const float* out = reinterpret_cast<const float*>(out_.data());
    const int64_t rows = queries_ * kGroup, row = rows - 1;
    const float* q = reinterpret_cast<const float*>(q_.data()) +
                     (queries_ - 1) * kHeads * kGroup * kHeadDim + (kGroup - 1) * kHeadDim;
    const auto k = widened(table_, dtype_, kv_.data(), queries_ * kHeadDim);
    double sum = 0, max = -1e30;
    std::vector<double> score(static_cast<size_t>(queries_));
    for (size_t j = 0; j < score.size(); ++j) {
      for (size_t d = 0; d < kHeadDim; ++d) score[j] += kScale * q[d] * k[j * kHeadDim + d];
      max = std::max(max, score[j]);
    }
    for (double s : score) sum += std::exp(s - max);
    require_near(out[row], max, 1e-5, tier + " " + name + " maximum");
    require_near(out[rows + row], sum, 1e-3 * sum, tier + " " + name + " sum");
  }

  double pass_s() override {
    return timed(machine_.threads, [&](int t, std::barrier<>&) {
      for (int64_t head = t; head < kHeads; head += machine_.threads) run(head, t);
    });
  }

 private:
  static constexpr float kScale = 0.08838834764f;  // 1 / sqrt(128)

  // K and V of a head lie one after the other.
  void run(int64_t head, int thread) {
    const int64_t bytes = queries_ * kHeadDim * dtype_bytes(dtype_);
    const char* k = kv_.data() + 2 * head * bytes;
    const int64_t rows = queries_ * kGroup;
    float* out = reinterpret_cast<float*>(out_.data()) + thread * rows * (kHeadDim + 2);
    cpu::AttentionArgs args{};
    args.q = reinterpret_cast<const float*>(q_.data()) + head * kGroup * kHeadDim;
    args.q_stride = kHeads * kGroup * kHeadDim;
    args.queries = queries_;
    args.group = kGroup;
    args.head_dim = kHeadDim;
    args.scale = kScale;
    args.span.k = k;
    args.span.v = k + bytes;
    args.span.count = queries_;
    args.m = out;
    args.s = out + rows;
    args.o = out + 2 * rows;
    args.scratch = scratch_.data() + thread * scratch_bytes_;
    table_.attention[static_cast<int>(dtype_)](args);
  }

  const cpu::KernelTable& table_;
  DType dtype_;
  int64_t queries_;
  Machine machine_;
  probe::Buffer kv_, q_, out_;
  int64_t scratch_bytes_;
  probe::Buffer scratch_;
};

}  // namespace

std::unique_ptr<Case> matmul_case(const cpu::KernelTable& table, DType dtype, int64_t tokens,
                                  std::shared_ptr<Weights> weights, const Machine& machine) {
  return std::make_unique<Matmul>(table, dtype, tokens, std::move(weights), machine);
}

std::unique_ptr<Case> prefill_attention_case(const cpu::KernelTable& table, DType dtype,
                                             int64_t queries, const Machine& machine) {
  return std::make_unique<PrefillAttention>(table, dtype, queries, machine);
}

}  // namespace helm::bench
