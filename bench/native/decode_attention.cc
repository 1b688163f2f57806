// Decode attention as the engine runs it: stages of attention layers over paged KV, on the pool.
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "cases.h"
#include "cpu/kv_page.h"
#include "cpu/stage.h"
#include "probe/synthetic.h"

namespace helm::bench {
namespace {

constexpr int64_t kPagesBytes = int64_t{640} << 20;
constexpr int64_t kPageTokens = 512;

class DecodeAttention : public Case {
 public:
  DecodeAttention(const cpu::KernelTable& table, DType kv_dtype, const DecodeShape& shape,
                  std::shared_ptr<const probe::Buffer> pages, const Machine& machine)
      : table_(table), shape_(shape), pages_(std::move(pages)), threads_(machine.threads) {
    name = "decode attention " + std::to_string(shape.heads) + "/" +
           std::to_string(shape.kv_heads) + "/" + std::to_string(shape.head_dim) + " context " +
           std::to_string(shape.context) + " x " + std::to_string(shape.sequences);
    tier = table.name;
    dtype = dtype_name(kv_dtype);
    make_plan(kv_dtype);
    compile();
    const int64_t row = plan_.kv.row_bytes() + kv_scale_bytes(kv_dtype);
    work = 2.0 * static_cast<double>(shape.kv_heads * row) *
           static_cast<double>(shape.context * shape.sequences * plan_.kv.entries());
  }

  // One head of the last sequence in the last layer, against doubles.
  void verify() override {
    pass_s();
    const int64_t layer = plan_.kv.entries() - 1, dim = shape_.head_dim, head = shape_.heads - 1;
    const int64_t row = shape_.sequences - 1;
    const std::vector<float> q = scaled_query(qkv() + row * qkv_width() + head * dim);
    std::vector<double> weights;
    double max = -1e30, sum = 0;
    for (int64_t j = 0; j < shape_.context; ++j) {
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score += q[static_cast<size_t>(d)] * cached(layer, j, d, false);
      weights.push_back(score);
      max = std::max(max, score);
    }
    for (double& w : weights) sum += w = std::exp(w - max);
    // Rounded to bf16, a weight is off by 2e-3 at most, and hundreds of them by much less.
    const double bound = rounds() ? 4e-4 : 1e-4;
    for (int64_t d = 0; d < dim; d += 31) {
      double want = 0, size = 0;
      for (int64_t j = 0; j < shape_.context; ++j) {
        const double v = weights[static_cast<size_t>(j)] / sum * cached(layer, j, d, true);
        want += v, size += std::abs(v);
      }
      const double got = out()[row * shape_.heads * dim + head * dim + d];
      if (!(std::abs(got - want) <= bound * size)) {
        throw Error(ErrorKind::kInvalid, "[bench] " + tier + " " + dtype + " " + name + " gives " +
                                             std::to_string(got) + ", expected " +
                                             std::to_string(want));
      }
    }
  }

  double pass_s() override {
    const auto begin = std::chrono::steady_clock::now();
    stage_->run({tokens_, positions_, {}, runs_});
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  static constexpr float kScale = 0.08838834764f;  // 1 / sqrt(128)

  // Whether queries and weights are rounded to bf16.
  bool rounds() const {
    constexpr DType kBf16 = DType::kBF16;
    return plan_.kv.dtype == kBf16 && table_.activations[static_cast<int>(kBf16)] == kBf16;
  }
  // kScale * q as the kernel rounds it.
  std::vector<float> scaled_query(const float* q) const {
    std::vector<float> scaled(q, q + shape_.head_dim);
    for (float& x : scaled) x *= kScale;
    if (!rounds()) return scaled;
    constexpr int kBf16 = static_cast<int>(DType::kBF16);
    std::vector<uint16_t> narrow(scaled.size());
    table_.narrow[kBf16](scaled.data(), narrow.data(), shape_.head_dim);
    table_.widen[kBf16](narrow.data(), scaled.data(), shape_.head_dim);
    return scaled;
  }
  int64_t qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }
  int64_t blocks() const { return (shape_.context + kPageTokens - 1) / kPageTokens; }
  float* qkv() const { return reinterpret_cast<float*>(values_.data()); }
  float* out() const { return qkv() + shape_.sequences * qkv_width(); }

  // Element d of the last KV head's key or value at a position of the last sequence.
  double cached(int64_t layer, int64_t position, int64_t d, bool value) const {
    const int64_t head = shape_.kv_heads - 1;
    const int32_t page = runs_.back().pages[position / kPageTokens * plan_.kv.entries() + layer];
    const cpu::KvPages kv{reinterpret_cast<std::byte*>(pages_->data()), plan_.kv, shape_.kv_heads};
    const std::byte* rows = value ? kv.values(page, head) : kv.keys(page, head);
    const float* scales = value ? kv.value_scales(page, head) : kv.key_scales(page, head);
    const int64_t slot = position % kPageTokens, i = slot * shape_.head_dim + d;
    if (scales != nullptr) return scales[slot] * static_cast<double>(static_cast<int8_t>(rows[i]));
    float element = 0;
    table_.widen[static_cast<int>(plan_.kv.dtype)](rows + i * dtype_bytes(plan_.kv.dtype), &element,
                                                   1);
    return element;
  }

  void make_plan(DType kv_dtype) {
    const DecodeShape& s = shape_;
    plan_.kv = {kv_dtype, kPageTokens, {{0, 0, s.kv_heads}}, s.kv_heads, s.head_dim, 0};
    const int64_t layers =
        std::max<int64_t>(1, kPagesBytes / (plan_.kv.page_bytes(0) * blocks() * s.sequences));
    for (int64_t layer = 1; layer < layers; ++layer) {
      plan_.kv.layers.push_back({layer, 0, s.kv_heads});
    }
    plan_.kv.blocks = blocks() * s.sequences;
    plan_.limits = {s.context, s.sequences, s.sequences, s.sequences};
    plan_.values = {{"qkv", qkv_width(), false}, {"out", s.heads * s.head_dim, false}};
    plan_.units.resize(1);
    for (int64_t layer = 0; layer < layers; ++layer) {
      plan_.units[0].ops.emplace_back(AttentionOp{0, 0, s.heads * s.head_dim,
                                                  (s.heads + s.kv_heads) * s.head_dim, 1, layer,
                                                  s.heads, s.kv_heads, s.head_dim, kScale, 0});
    }
  }

  void compile() {
    const int64_t floats = shape_.sequences * (qkv_width() + shape_.heads * shape_.head_dim);
    values_ = Arena(floats * int64_t{sizeof(float)}, "values");
    const std::vector<uint16_t>& noise = probe::noise();
    std::memcpy(values_.data(), noise.data(),
                std::min(static_cast<size_t>(floats) * sizeof(float), 2 * noise.size()));
    for (int64_t i = 0; i < floats; ++i) qkv()[i] = std::fmod(qkv()[i] * 64, 1.0F);
    workspace_ = Arena(cpu::CpuStage::workspace_bytes(plan_, plan_.units, table_, threads_.size()),
                       "workspace");
    StageSpec spec{&plan_,
                   plan_.units,
                   {},
                   {},
                   std::vector(plan_.kv.layers.size(), cpu::device_address(pages_->data())),
                   cpu::device_address(workspace_.data())};
    spec.values = {cpu::device_address(qkv()), cpu::device_address(out())};
    stage_ = std::make_unique<cpu::CpuStage>(spec, table_, threads_);
    tokens_.assign(static_cast<size_t>(shape_.sequences), 0);
    positions_.assign(tokens_.size(), static_cast<int32_t>(shape_.context - 1));
    for (int64_t i = 0; i < plan_.kv.pages(); ++i) {
      page_table_.push_back(static_cast<int32_t>(i * shape_.kv_heads));
    }
    for (int64_t i = 0; i < shape_.sequences; ++i) {
      runs_.push_back(
          {i, 1, shape_.context - 1, page_table_.data() + i * blocks() * plan_.kv.entries()});
    }
  }

  const cpu::KernelTable& table_;
  DecodeShape shape_;
  std::shared_ptr<const probe::Buffer> pages_;
  ThreadPool threads_;
  Plan plan_;
  Arena values_, workspace_;
  std::unique_ptr<cpu::CpuStage> stage_;
  std::vector<int32_t> tokens_, positions_, page_table_;
  std::vector<SequenceRun> runs_;
};

}  // namespace

std::shared_ptr<const probe::Buffer> make_pages() {
  auto pages = std::make_shared<probe::Buffer>(kPagesBytes);
  const std::vector<uint16_t>& noise = probe::noise();
  const auto tile = static_cast<int64_t>(noise.size() * sizeof(uint16_t));
  constexpr int64_t kOverlap = 254;  // so that no two pages are equal
  for (int64_t at = 0; at < kPagesBytes; at += tile - kOverlap) {
    std::memcpy(pages->data() + at, noise.data(),
                static_cast<size_t>(std::min(tile, kPagesBytes - at)));
  }
  return pages;
}

std::unique_ptr<Case> decode_attention_case(const cpu::KernelTable& table, DType kv_dtype,
                                            const DecodeShape& shape,
                                            std::shared_ptr<const probe::Buffer> pages,
                                            const Machine& machine) {
  return std::make_unique<DecodeAttention>(table, kv_dtype, shape, std::move(pages), machine);
}

}  // namespace helm::bench
