// Cases by shape: matrix-vector products of real models, attention by context, prompts, norm,
// activation.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "cases.h"
#include "inputs.h"
#include "kernels/vec.cuh"

namespace helm::bench {
namespace {

constexpr const char* kOverlapping = " pdl";  // launches, see cuda::Queue
constexpr DType kStored[] = {DType::kF16, DType::kBF16};

class MatvecCase : public Case {
 public:
  MatvecCase(std::string what, int64_t rotation_bytes, DType dtype, int64_t tokens, int64_t rows,
             int64_t cols, bool overlaps)
      : Case(std::move(what), rows * cols * dtype_bytes(dtype)),
        overlaps_(overlaps),
        copy_bytes_(bytes),
        copies_(std::max<int64_t>(1, rotation_bytes / copy_bytes_)),
        w_(copy_bytes_ * copies_),
        a_(tokens * cols * 4),
        c_(tokens * rows * 4) {
    args_ = {a_.as<float>(), cols,    tokens, w_.as(),        dtype, rows,
             cols,           nullptr, false,  c_.as<float>(), rows};
    fill(w_, dtype);
    fill(a_, DType::kF32);
    verify();
  }

  void enqueue(cudaStream_t stream) override {
    args_.w = w_.as<char>() + next_++ % copies_ * copy_bytes_;
    cuda::matvec(args_, {stream, overlaps_});
  }

 private:
  // Every 97th row in double precision.
  void verify() {
    cuda::matvec(args_, nullptr);
    const auto c = download<float>(c_.as(), args_.tokens * args_.rows);
    const auto a = download<float>(a_.as(), args_.tokens * args_.cols);
    const int64_t row_bytes = args_.cols * dtype_bytes(args_.dtype);
    for (int64_t r = 0; r < args_.rows; r += 97) {
      const auto w = download<char>(w_.as<char>() + r * row_bytes, row_bytes);
      for (int64_t t = 0; t < args_.tokens; ++t) {
        double want = 0, size = 0;
        for (int64_t k = 0; k < args_.cols; ++k) {
          const double v = static_cast<double>(a[static_cast<size_t>(t * args_.cols + k)]) *
                           widened(args_.dtype, w.data(), k);
          want += v, size += std::abs(v);
        }
        const double got = c[static_cast<size_t>(t * args_.rows + r)];
        require(std::abs(got - want) <= static_cast<double>(args_.cols + 3) * 1.2e-7 * size, name,
                t * args_.rows + r, got, want);
      }
    }
  }

  bool overlaps_;
  int64_t copy_bytes_, copies_, next_ = 0;
  DeviceBuffer w_, a_, c_;
  cuda::MatvecArgs args_;
};

// One new token and `context` positions: all that its sequence has, or (`near`) the newer half,
// whose attention is merged into a partial, as where older pages lie in host memory.
class AttentionCase : public Case {
 public:
  AttentionCase(std::string what, int64_t rotation_bytes, DType dtype, bool near, int64_t context,
                int64_t splits, int64_t heads, int64_t kv_heads)
      : Case(std::move(what), 2 * context * kv_heads * kHeadDim * dtype_bytes(dtype)),
        context_(context),
        layers_(std::max<int64_t>(1, rotation_bytes / layer_bytes(dtype, context, kv_heads))),
        pool_(layers_ * layer_bytes(dtype, context, kv_heads)),
        x_(heads * kHeadDim * 4),
        out_(heads * kHeadDim * 4),
        partial_(heads * (kHeadDim + 2) * 4),
        partials_(std::max<int64_t>(4, cuda::attention_partials_bytes(1, heads, kHeadDim, splits))),
        tables_(static_cast<int64_t>(sizeof(cuda::Run))),
        pages_(layers_ * blocks() * 4) {
    std::vector<int32_t> pages(static_cast<size_t>(layers_ * blocks()));
    for (size_t i = 0; i < pages.size(); ++i)
      pages[i] = static_cast<int32_t>(i) * static_cast<int32_t>(kv_heads);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
    upload(pages_, pages);
    const int64_t first = near ? blocks() : 0;
    const cuda::Run run{0,
                        1,
                        static_cast<int32_t>(context - 1 + first * kPageTokens),
                        static_cast<int32_t>(-first * layers_),
                        static_cast<int32_t>(first),
                        static_cast<int32_t>(first + blocks())};
    check(cudaMemcpy(tables_.as(), &run, sizeof run, cudaMemcpyDefault), "upload");
    step_.runs = tables_.as<cuda::Run>();
    step_.pages = pages_.as<int32_t>();
    step_.entries = static_cast<int32_t>(layers_);
    args_ = {x_.as<float>(),
             heads * kHeadDim,
             0,
             near ? nullptr : out_.as<float>(),
             near ? partial_.as<float>() : nullptr,
             heads,
             0.09f,
             0,
             0,
             {pool_.as(), dtype, kPageTokens, kv_heads, kHeadDim},
             1,
             1,
             1,
             1,
             splits,
             1,
             partials_.as()};
    fill(pool_, dtype);
    fill(x_, DType::kF32);
    verify(pages);
  }

  void enqueue(cudaStream_t stream) override {
    args_.layer = next_++ % layers_;
    cuda::attention(args_, step_, stream);
  }

 private:
  static constexpr int64_t kHeadDim = 128, kPageTokens = 512;
  int64_t blocks() const { return cuda::ceil_div(context_, kPageTokens); }
  static int64_t layer_bytes(DType dtype, int64_t context, int64_t kv_heads) {
    return cuda::ceil_div(context, kPageTokens) * kPageTokens * 2 * kv_heads * kHeadDim *
           dtype_bytes(dtype);
  }

  // The first query head of every KV head in double precision.
  void verify(const std::vector<int32_t>& pages) {
    const DeviceBuffer none(partial_.bytes());
    cuda::reset_partial(partial_.as<float>(), 1, args_.heads, kHeadDim, nullptr);
    cuda::reset_partial(none.as<float>(), 1, args_.heads, kHeadDim, nullptr);
    cuda::attention(args_, step_, nullptr);
    if (args_.partial != nullptr) {
      cuda::merge_partials(
          {none.as<float>(), args_.partial, out_.as<float>(), args_.heads, kHeadDim, 1}, nullptr);
    }
    const auto out = download<float>(out_.as(), args_.heads * kHeadDim);
    const auto x = download<float>(x_.as(), args_.heads * kHeadDim);
    const int64_t page_bytes = pool_.bytes() / layers_ / blocks();
    const int64_t unit_bytes = page_bytes / args_.kv.kv_heads;
    std::vector<std::vector<char>> layer;  // the first one's pages, block by block
    for (int64_t block = 0; block < blocks(); ++block) {
      const int64_t unit = pages[static_cast<size_t>(block * layers_)];
      layer.push_back(download<char>(pool_.as<char>() + unit * unit_bytes, page_bytes));
    }
    for (int64_t head = 0; head < args_.kv.kv_heads; ++head) {
      const int64_t q = head * (args_.heads / args_.kv.kv_heads) * kHeadDim;
      std::vector<double> want(kHeadDim);
      double sum = 0;
      for (int64_t j = 0; j < context_; ++j) {
        const char* page = layer[static_cast<size_t>(j / kPageTokens)].data();
        const auto row = [&](int64_t slab) {
          return (slab * kPageTokens + j % kPageTokens) * kHeadDim;
        };
        double score = 0;
        for (int64_t d = 0; d < kHeadDim; ++d) {
          score += static_cast<double>(x[static_cast<size_t>(q + d)]) * args_.scale *
                   widened(args_.kv.dtype, page, row(head) + d);
        }
        const double weight = std::exp(score);
        sum += weight;
        for (int64_t d = 0; d < kHeadDim; ++d) {
          want[static_cast<size_t>(d)] +=
              weight * widened(args_.kv.dtype, page, row(head + args_.kv.kv_heads) + d);
        }
      }
      for (int64_t d = 0; d < kHeadDim; ++d) {
        const double got = out[static_cast<size_t>(q + d)], w = want[static_cast<size_t>(d)] / sum;
        require(std::abs(got - w) <= 1e-6, name, q + d, got, w);  // V is about 0.01
      }
    }
  }

  int64_t context_, layers_, next_ = 0;
  DeviceBuffer pool_, x_, out_, partial_, partials_, tables_, pages_;
  cuda::StepTables step_{};
  cuda::AttentionArgs args_;
};

// Norm or activation over rows of one width, in and out.
class RowsCase : public Case {
 public:
  using Launch = std::function<void(const float* x, float* y, cudaStream_t stream)>;
  RowsCase(std::string what, int64_t rotation_bytes, int64_t x_bytes, int64_t y_bytes,
           Launch launch)
      : Case(std::move(what), x_bytes + y_bytes),
        copies_(std::max<int64_t>(1, rotation_bytes / (x_bytes + y_bytes))),
        x_bytes_(x_bytes),
        y_bytes_(y_bytes),
        x_(x_bytes * copies_),
        y_(y_bytes * copies_),
        launch_(std::move(launch)) {
    fill(x_, DType::kF32);
  }
  void enqueue(cudaStream_t stream) override {
    const int64_t i = next_++ % copies_;
    launch_(reinterpret_cast<const float*>(x_.as<char>() + i * x_bytes_),
            reinterpret_cast<float*>(y_.as<char>() + i * y_bytes_), stream);
  }

 private:
  int64_t copies_, x_bytes_, y_bytes_, next_ = 0;
  DeviceBuffer x_, y_;
  Launch launch_;
};

struct Shape {
  const char* name;
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {
    {"qwen3-0.6b q", 2048, 1024},       {"qwen3-0.6b k", 1024, 1024},
    {"qwen3-0.6b gate", 3072, 1024},    {"qwen3-0.6b down", 1024, 3072},
    {"qwen3-0.6b head", 151936, 1024},  {"qwen3-8b q", 4096, 4096},
    {"qwen3-8b gate", 12288, 4096},     {"qwen3-8b down", 4096, 12288},
    {"qwen3-8b head", 151936, 4096},    {"llama-3.1-8b k", 1024, 4096},
    {"llama-3.1-8b gate", 14336, 4096}, {"llama-3.1-8b down", 4096, 14336},
};
constexpr Shape kPackedShapes[] = {
    {"tiny", 200, 512},
    {"qwen3-8b q", 4096, 4096},
    {"qwen3-8b gate", 12288, 4096},
    {"qwen3-8b down", 4096, 12288},
};
struct Packed {
  const char* name;
  Format format;
};
constexpr Packed kPacked[] = {{"q8", {Codes::kC8, Scales::kS, 32, 128}},
                              {"q4", {Codes::kC4, Scales::kKM, 32}},
                              {"q6_k", {Codes::kC6, Scales::kK, 16, 32}}};
constexpr LayerShape kLayers[] = {
    {"tiny", 256, 4, 2, 64, 768},
    {"qwen3-0.6b", 1024, 16, 8, 128, 3072},
    {"qwen3-8b", 4096, 32, 8, 128, 12288},
};

// The launches that a device is measured with: those that overlap where it can.
std::vector<bool> kinds_of_launches() {
  if (cuda::kernels_await_previous()) return {false, true};
  return {false};
}

}  // namespace

void for_each_case(const std::vector<std::string>& matches, int64_t rotation_bytes,
                   const std::function<void(Case&)>& use) {
  const auto keep = [&](const std::string& name, auto make) {
    const auto found = [&](const std::string& text) {
      return name.find(text) != std::string::npos;
    };
    if (matches.empty() || std::ranges::any_of(matches, found)) use(*make(name));
  };
  constexpr int64_t kHeads = 32, kKvHeads = 8;
  const auto attention = [&](DType dtype, bool near, int64_t context, int64_t splits) {
    keep(std::string(near ? "attend " : "attention ") + name_of(dtype) + " heads " +
             std::to_string(kHeads) + "/" + std::to_string(kKvHeads) + " context " +
             std::to_string(context) + " splits " + std::to_string(splits),
         [&](const std::string& name) {
           return std::make_unique<AttentionCase>(name, rotation_bytes, dtype, near, context,
                                                  splits, kHeads, kKvHeads);
         });
  };
  for (DType dtype : kStored) {
    for (const Shape& s : kShapes) {
      for (int64_t tokens : {1, 2, 4, 8}) {
        for (const bool overlaps : kinds_of_launches()) {
          if (overlaps && (dtype != DType::kF16 || tokens != 1)) continue;
          keep(std::string("matvec ") + name_of(dtype) + " " + s.name + " " +
                   std::to_string(s.rows) + "x" + std::to_string(s.cols) + " tokens " +
                   std::to_string(tokens) + (overlaps ? kOverlapping : ""),
               [&](const std::string& name) {
                 return std::make_unique<MatvecCase>(name, rotation_bytes, dtype, tokens, s.rows,
                                                     s.cols, overlaps);
               });
        }
      }
    }
    for (int64_t context : {1024, 8192, 32768}) {
      const int64_t chosen = cuda::decode_splits(multiprocessors(), 1, kHeads, kKvHeads, context);
      for (int64_t splits : {1, 8, 32, 64}) {
        if (splits != chosen) attention(dtype, false, context, splits);
      }
      attention(dtype, false, context, chosen);
      attention(dtype, true, context, chosen);
    }
  }
  for (const auto& [kind, format] : kPacked) {
    for (const Shape& s : kPackedShapes) {
      for (int64_t tokens : {1, 4, 8}) {
        keep(std::string("packed ") + kind + " " + s.name + " " + std::to_string(s.rows) + "x" +
                 std::to_string(s.cols) + " tokens " + std::to_string(tokens),
             [&](const std::string& name) {
               return packed_case(name, format, tokens, s.rows, s.cols, rotation_bytes);
             });
      }
    }
  }
  for (const LayerShape& shape : kLayers) {
    for (const bool overlaps : kinds_of_launches()) {
      keep(
          std::string("layer f16 ") + shape.name + " context 1024" + (overlaps ? kOverlapping : ""),
          [&](const std::string& name) {
            return layer_case(name, shape, rotation_bytes, overlaps);
          });
    }
  }
  for (DType dtype : kStored) {
    for (const auto& [tokens, behind] :
         {std::pair<int64_t, int64_t>{16, 64}, {64, 8192}, {512, 8192}, {4096, 8192}}) {
      keep(prompt_name(dtype, tokens, behind),
           [&](const std::string& name) { return prompt_case(name, dtype, tokens, behind); });
    }
  }
  const auto ones = std::make_shared<DeviceBuffer>(4096 * 4);
  fill(*ones, DType::kF32);
  for (int64_t rows : {1, 512}) {
    keep("norm 4096 rows " + std::to_string(rows), [&](const std::string& name) {
      return std::make_unique<RowsCase>(
          name, rotation_bytes, rows * 4096 * 4, rows * 4096 * 4,
          [ones, rows](const float* x, float* y, cudaStream_t stream) {
            cuda::norm({false, x, 4096, y, 4096, rows, 1, 4096, ones->as<float>(), nullptr, 1e-6f},
                       stream);
          });
    });
    keep("activation silu gated 12288 rows " + std::to_string(rows), [&](const std::string& name) {
      return std::make_unique<RowsCase>(
          name, rotation_bytes, rows * 2 * 12288 * 4, rows * 12288 * 4,
          [rows](const float* x, float* y, cudaStream_t stream) {
            cuda::activation({ActivationKind::kSilu, true, x, 2 * 12288, y, 12288, rows, 12288},
                             stream);
          });
    });
  }
}

}  // namespace helm::bench
