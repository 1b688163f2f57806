// A layer of a decode step, as a stage launches it: eleven kernels, most of them small, one after
// the other on one stream.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "cases.h"
#include "inputs.h"
#include "kernels/vec.cuh"

namespace helm::bench {
namespace {

constexpr DType kWeights = DType::kF16;
constexpr int64_t kContext = 1024, kPageTokens = 512, kBlocks = kContext / kPageTokens;

struct Sizes {
  explicit Sizes(const LayerShape& s)
      : q_width(s.heads * s.head_dim),
        kv_width(s.kv_heads * s.head_dim),
        qkv((q_width + 2 * kv_width) * s.width),
        o(s.width * q_width),
        gate_up(2 * s.inner * s.width),
        down(s.width * s.inner),
        page(2 * kPageTokens * kv_width) {}

  int64_t weights() const { return qkv + o + gate_up + down; }
  int64_t bytes() const { return (weights() + kBlocks * page) * dtype_bytes(kWeights); }

  int64_t q_width, kv_width;
  int64_t qkv, o, gate_up, down, page;  // elements
};

class LayerCase : public Case {
 public:
  LayerCase(const std::string& what, const LayerShape& shape, int64_t rotation_bytes, bool overlaps)
      : Case(what, Sizes(shape).bytes()),
        shape_(shape),
        sizes_(shape),
        overlaps_(overlaps),
        copies_(std::max<int64_t>(1, rotation_bytes / bytes)),
        weights_(copies_ * sizes_.weights() * dtype_bytes(kWeights)),
        pool_(copies_ * kBlocks * sizes_.page * dtype_bytes(kWeights)),
        ones_(std::max(shape.width, shape.head_dim) * 4),
        frequencies_(shape.head_dim / 2 * 4),
        x_(shape.width * 4),
        h_(shape.width * 4),
        qkv_((sizes_.q_width + 2 * sizes_.kv_width) * 4),
        attended_(sizes_.q_width * 4),
        gate_up_(2 * shape.inner * 4),
        inner_(shape.inner * 4),
        tables_(256),
        pages_(copies_ * kBlocks * 4) {
    for (const DeviceBuffer* buffer : {&weights_, &pool_}) fill(*buffer, kWeights);
    for (const DeviceBuffer* buffer : {&ones_, &frequencies_}) fill(*buffer, DType::kF32);
    std::vector<int32_t> pages(static_cast<size_t>(copies_ * kBlocks));
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = static_cast<int32_t>(i) * static_cast<int32_t>(shape.kv_heads);
    }
    const cuda::Run run{0, 1, kContext - 1, 0, 0, kBlocks};
    const int32_t position = kContext - 1, of_run = 0;
    const auto upload = [](void* to, const void* from, size_t size) {
      check(cudaMemcpy(to, from, size, cudaMemcpyDefault), "upload");
    };
    upload(pages_.as(), pages.data(), pages.size() * sizeof(int32_t));
    upload(tables_.as<char>(), &run, sizeof run);
    upload(tables_.as<char>() + 64, &position, sizeof position);
    upload(tables_.as<char>() + 128, &of_run, sizeof of_run);
    step_.runs = tables_.as<cuda::Run>();
    step_.positions = reinterpret_cast<int32_t*>(tables_.as<char>() + 64);
    step_.row_runs = reinterpret_cast<int32_t*>(tables_.as<char>() + 128);
    step_.pages = pages_.as<int32_t>();
    step_.entries = static_cast<int32_t>(copies_);
    splits_ = cuda::decode_splits(multiprocessors(), 1, shape.heads, shape.kv_heads, kContext);
    partials_.emplace(std::max<int64_t>(
        4, cuda::attention_partials_bytes(1, shape.heads, shape.head_dim, splits_)));
    verify();
  }

  void enqueue(cudaStream_t stream) override { run({stream, overlaps_}, next_++ % copies_); }

 private:
  // x += attention(x); x += mlp(x), with the copy's weights and pages.
  void run(const cuda::Queue& queue, int64_t copy) {
    const LayerShape& s = shape_;
    const int64_t width = s.width, qkv_width = sizes_.q_width + 2 * sizes_.kv_width;
    const auto* qkv = weights_.as<uint16_t>() + copy * sizes_.weights();
    const auto* o = qkv + sizes_.qkv;
    const auto* gate_up = o + sizes_.o;
    const auto* down = gate_up + sizes_.gate_up;
    float *x = x_.as<float>(), *h = h_.as<float>(), *q = qkv_.as<float>();
    float *attended = attended_.as<float>(), *inner = inner_.as<float>();
    const auto norm = [&](float* from, float* to, int64_t groups, int64_t n) {
      cuda::norm(
          {false, from, qkv_width, to, qkv_width, 1, groups, n, ones_.as<float>(), nullptr, 1e-6f},
          queue);
    };
    const auto multiply = [&](const float* in, int64_t cols, const uint16_t* w, int64_t rows,
                              float* out, bool adds) {
      cuda::matvec({in, cols, 1, w, kWeights, rows, cols, nullptr, adds, out, rows}, queue);
    };
    const cuda::KvPool kv{pool_.as(), kWeights, kPageTokens, s.kv_heads, s.head_dim};
    const cuda::RopeArgs rope{
        q,    qkv_width, 0, s.heads + s.kv_heads, s.head_dim, s.head_dim, frequencies_.as<float>(),
        1.0f, 1};

    norm(x, h, 1, width);
    multiply(h, width, qkv, qkv_width, q, false);
    norm(q, q, s.heads, s.head_dim);
    norm(q + sizes_.q_width, q + sizes_.q_width, s.kv_heads, s.head_dim);
    cuda::append(
        {q, qkv_width, sizes_.q_width, sizes_.q_width + sizes_.kv_width, copy, kv, 1, &rope}, step_,
        queue);
    cuda::attention({q, qkv_width, 0, attended, nullptr, s.heads, 0.09f, 0, copy, kv, 1, 1, 1, 1,
                     splits_, 1, partials_->as()},
                    step_, queue);
    multiply(attended, sizes_.q_width, o, width, x, true);
    norm(x, h, 1, width);
    multiply(h, width, gate_up, 2 * s.inner, gate_up_.as<float>(), false);
    cuda::activation({ActivationKind::kSilu, true, gate_up_.as<float>(), 2 * s.inner, inner,
                      s.inner, 1, s.inner},
                     queue);
    multiply(inner, s.inner, down, width, x, true);
  }

  // Overlapping launches change no bit: a kernel that does not wait would read what is not there
  // yet.
  void verify() {
    std::vector<float> results[2];
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "stream");
    for (const bool overlaps : {false, true}) {
      if (overlaps && !overlaps_) break;
      fill(x_, DType::kF32);
      for (int i = 0; i < 4; ++i) run({stream, overlaps}, i % copies_);
      check(cudaStreamSynchronize(stream), "kernels");
      results[overlaps].resize(static_cast<size_t>(shape_.width));
      check(cudaMemcpy(results[overlaps].data(), x_.as(), static_cast<size_t>(x_.bytes()),
                       cudaMemcpyDefault),
            "download");
    }
    check(cudaStreamDestroy(stream), "stream");
    for (size_t i = 0; i < results[0].size(); ++i) {
      const float plain = results[0][i], overlapping = results[overlaps_ ? 1 : 0][i];
      if (std::isfinite(plain) && std::memcmp(&plain, &overlapping, sizeof plain) == 0) continue;
      throw Error(ErrorKind::kInvalid, "[bench] " + name + ": element " + std::to_string(i) +
                                           " is " + std::to_string(overlapping) +
                                           " with overlapping launches, else " +
                                           std::to_string(plain));
    }
  }

  LayerShape shape_;
  Sizes sizes_;
  bool overlaps_;
  int64_t copies_, next_ = 0, splits_ = 1;
  DeviceBuffer weights_, pool_, ones_, frequencies_;
  DeviceBuffer x_, h_, qkv_, attended_, gate_up_, inner_, tables_, pages_;
  std::optional<DeviceBuffer> partials_;
  cuda::StepTables step_{};
};

}  // namespace

std::unique_ptr<Case> layer_case(const std::string& name, const LayerShape& shape,
                                 int64_t rotation_bytes, bool overlaps) {
  return std::make_unique<LayerCase>(name, shape, rotation_bytes, overlaps);
}

}  // namespace helm::bench
