// Prompt attention in tensor cores, beside the same by the kernel of f32.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "cases.h"
#include "inputs.h"
#include "kernels/vec.cuh"

namespace helm::bench {
namespace {

constexpr int64_t kHeads = 32, kKvHeads = 8, kGroup = kHeads / kKvHeads, kHeadDim = 128;
constexpr int64_t kPageTokens = 512;
constexpr float kScale = 700;  // scores of about 1

// `tokens` new tokens and `behind` positions before them, in pages in any order.
class PromptCase : public Case {
 public:
  PromptCase(std::string what, DType dtype, int64_t tokens, int64_t behind)
      : Case(std::move(what), 2 * (behind + tokens) * kKvHeads * kHeadDim * dtype_bytes(dtype)),
        tokens_(tokens),
        behind_(behind),
        page_bytes_(2 * kKvHeads * kPageTokens * kHeadDim * dtype_bytes(dtype)),
        splits_(
            cuda::prompt_splits(cuda::prompt_blocks(tokens, kHeads, kKvHeads), behind + tokens)),
        pool_(blocks() * page_bytes_),
        x_(tokens * kHeads * kHeadDim * 4),
        out_(tokens * kHeads * kHeadDim * 4),
        partials_(std::max<int64_t>(
            4, cuda::attention_partials_bytes(tokens, kHeads, kHeadDim, splits_))),
        tables_(static_cast<int64_t>(sizeof(cuda::Run))),
        pages_(blocks() * 4) {
    std::vector<int32_t> pages(static_cast<size_t>(blocks()));
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i * kKvHeads);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
    upload(pages_, pages);
    const cuda::Run run{0, static_cast<int32_t>(tokens),  static_cast<int32_t>(behind), 0,
                        0, static_cast<int32_t>(blocks())};
    check(cudaMemcpy(tables_.as(), &run, sizeof run, cudaMemcpyDefault), "upload");
    step_.runs = tables_.as<cuda::Run>();
    step_.pages = pages_.as<int32_t>();
    step_.entries = 1;
    int device = 0, major = 0, minor = 0;
    check(cudaGetDevice(&device), "device");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "attribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "attribute");
    args_.x = x_.as<float>();
    args_.width = kHeads * kHeadDim;
    args_.out = out_.as<float>();
    args_.heads = kHeads;
    args_.scale = kScale;
    args_.kv = {pool_.as(), dtype, kPageTokens, kKvHeads, kHeadDim};
    args_.tokens = args_.rows = tokens;
    args_.runs = 1;
    args_.decode_splits = 1;
    args_.prompt_splits = splits_;
    args_.partials = partials_.as();
    args_.compute = major * 10 + minor;
    fill(pool_, dtype);
    fill(x_, DType::kF32);
    verify(pages);
  }

  void enqueue(cudaStream_t stream) override { cuda::attention(args_, step_, stream); }
  void enqueue_f32(cudaStream_t stream) override {
    cuda::AttentionArgs args = args_;
    args.compute = 0;
    cuda::attention(args, step_, stream);
  }
  // Of both products, over the keys that each query sees.
  double flops() const override {
    const auto keys = static_cast<double>(tokens_ * behind_ + tokens_ * (tokens_ + 1) / 2);
    return 4.0 * static_cast<double>(kHeads * kHeadDim) * keys;
  }

 private:
  int64_t blocks() const { return cuda::ceil_div(behind_ + tokens_, kPageTokens); }

  // Some rows, by either kernel, in double precision.
  void verify(const std::vector<int32_t>& pages) {
    for (const bool f32 : {false, true}) {
      f32 ? enqueue_f32(nullptr) : enqueue(nullptr);
      check(cudaDeviceSynchronize(), "kernels");
      for (const int64_t head : {int64_t{1}, kHeads - 1}) {
        for (const int64_t token : {int64_t{0}, tokens_ / 2, tokens_ - 1}) {
          verify_row(pages, token, head, f32);
        }
      }
    }
  }
  void verify_row(const std::vector<int32_t>& pages, int64_t token, int64_t head, bool f32) {
    const DType dtype = args_.kv.dtype;
    const int64_t at = (token * kHeads + head) * kHeadDim;
    const auto q = download<float>(x_.as<float>() + at, kHeadDim);
    const auto out = download<float>(out_.as<float>() + at, kHeadDim);
    const int64_t slab_bytes = kPageTokens * kHeadDim * dtype_bytes(dtype);
    std::vector<double> want(kHeadDim), size(kHeadDim);
    double sum = 0;
    for (int64_t block = 0; block * kPageTokens <= behind_ + token; ++block) {
      const char* page =
          pool_.as<char>() + pages[static_cast<size_t>(block)] / kKvHeads * page_bytes_;
      const auto k = download<char>(page + head / kGroup * slab_bytes, slab_bytes);
      const auto v = download<char>(page + (kKvHeads + head / kGroup) * slab_bytes, slab_bytes);
      const int64_t last = std::min(kPageTokens, behind_ + token + 1 - block * kPageTokens);
      for (int64_t j = 0; j < last; ++j) {
        double score = 0;
        for (int64_t d = 0; d < kHeadDim; ++d) {
          score += static_cast<double>(q[static_cast<size_t>(d)]) *
                   static_cast<double>(widened(dtype, k.data(), j * kHeadDim + d));
        }
        const double weight = std::exp(score * static_cast<double>(kScale));
        sum += weight;
        for (int64_t d = 0; d < kHeadDim; ++d) {
          const double part =
              weight * static_cast<double>(widened(dtype, v.data(), j * kHeadDim + d));
          want[static_cast<size_t>(d)] += part, size[static_cast<size_t>(d)] += std::abs(part);
        }
      }
    }
    const double unit = f32 ? 0x1p-14 : dtype == DType::kF16 ? 0x1p-10 : 0x1p-8;  // of weights
    for (size_t d = 0; d < kHeadDim; ++d) {
      const double got = static_cast<double>(out[d]), w = want[d] / sum;
      require(std::abs(got - w) <= unit * size[d] / sum, name, at + static_cast<int64_t>(d), got,
              w);
    }
  }

  int64_t tokens_, behind_, page_bytes_, splits_;
  DeviceBuffer pool_, x_, out_, partials_, tables_, pages_;
  cuda::StepTables step_{};
  cuda::AttentionArgs args_{};
};

}  // namespace

std::unique_ptr<Case> prompt_case(const std::string& name, DType dtype, int64_t tokens,
                                  int64_t behind) {
  return std::make_unique<PromptCase>(name, dtype, tokens, behind);
}

std::string prompt_name(DType dtype, int64_t tokens, int64_t behind) {
  return std::string("prompt ") + name_of(dtype) + " heads " + std::to_string(kHeads) + "/" +
         std::to_string(kKvHeads) + " tokens " + std::to_string(tokens) + " behind " +
         std::to_string(behind);
}

}  // namespace helm::bench
