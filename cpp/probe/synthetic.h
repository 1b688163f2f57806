// Stages of synthetic ops, of the shapes of a decoder block, compiled on any device for probes.
// Times nothing.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/memory.h"
#include "helm/plan.h"

namespace helm::probe {

// The block: grouped-query attention and a gated MLP of common proportions.
inline constexpr int64_t kHidden = 1536;
inline constexpr int64_t kInner = 4096;
inline constexpr int64_t kKvHeads = 2;
inline constexpr int64_t kMostKvHeads = 32;
inline constexpr int64_t kMostGroup = 64;  // query heads per KV head
inline constexpr int64_t kHeadDim = 128;
inline constexpr int64_t kPageTokens = 128;  // of serving; where pages end rates are less
inline constexpr int64_t kMostTokens = 4096;

inline constexpr int64_t kHandovers = 3;  // ops in a round of add_handovers

struct ProductShape {
  int64_t rows;
  int64_t cols;
  int parts;  // matrices stacked
};
std::span<const ProductShape> block_products();

// Random normal numbers in every dtype at once: as f16 of magnitude 1 to 1.5, as bf16 and f32 of
// 2^-7 to 2^-3. 1 MiB of them.
const std::vector<uint16_t>& noise();

// The member that fills a huge page, such that pages that follow one another go to members far
// apart, which are on different memory nodes where there are several (multiplicative hashing by the
// golden ratio, Knuth 6.4).
constexpr int member_for_page(int64_t page, int members) {
  const auto spread = static_cast<uint32_t>(static_cast<uint64_t>(page) * 2654435769u);
  return static_cast<int>((uint64_t{spread} * static_cast<uint64_t>(members)) >> 32);
}

// Fills memory of a device with noise().
using Fill = std::function<void(DeviceAddress to, int64_t bytes)>;

// Consecutive slices of the probe's memory, wrapping around: each op gets other matrices than those
// before it, as in the engine's arena. One call uses half of the memory, the next the other half.
class Slices {
 public:
  Slices(DeviceAddress memory, int64_t bytes) : memory_(memory), bytes_(bytes) {}
  DeviceAddress next(int64_t bytes);
  // Bytes handed out since the last call of start().
  void start() { taken_ = 0; }
  bool enough() const { return taken_ >= half(); }
  int64_t half() const { return bytes_ / 2; }
  // How many caches of `context` positions of one layer half of the memory holds, at least one.
  int64_t caches(DType dtype, int64_t kv_heads, int64_t context) const;

 private:
  DeviceAddress memory_;
  int64_t bytes_;
  int64_t at_ = 0;
  int64_t taken_ = 0;
};

// What one run does.
struct Work {
  double flops = 0;
  double bytes = 0;
};

// A plan of one unit under construction, then a stage that can run. Everything given to it must
// outlive it.
class Synthetic {
 public:
  Synthetic(Account& account, Slices& slices, const Fill& fill);

  ValueIndex value(int64_t width);
  // Pages for so many times `context` positions of one layer; returns the pages of each time.
  int64_t cache(DType dtype, int64_t times, int64_t kv_heads, int64_t context);

  // Each adds ops and returns what a run on `tokens` rows does.
  // A product with a matrix of its own; bytes that it reads of the matrix. bf16c on the CPU only.
  Work add_product(ValueIndex in, ValueIndex out, const ProductShape& shape, const Format& format,
                   int64_t tokens);
  // Attention of the last `tokens` of `context` positions, on values of width
  // (group + 2) * kv_heads * kHeadDim and group * kv_heads * kHeadDim; FLOPs of the pairs that
  // causality allows, bytes of the KV read.
  Work add_attention(ValueIndex qkv, ValueIndex out, int64_t group, int64_t tokens,
                     int64_t context);
  // Norms and a gated activation; bytes read and written.
  Work add_elementwise(int64_t tokens);
  void add_empty_ops(int64_t ops);
  // Products and norms on one row, with matrices that stay in caches; see StageProbe::handovers.
  void add_handovers(int64_t ops);

  // The stage for the last `tokens` of `context` positions.
  void compile(int64_t tokens, int64_t context);
  // One run; with the sequence's pages from `first_page` on.
  void run(Stream& stream, int64_t first_page = 0) const;

 private:
  TensorIndex tensor(std::vector<int64_t> shape, const Format& format);
  void add(Op op) { plan_.units[0].ops.push_back(std::move(op)); }

  Account& account_;
  Slices& slices_;
  const Fill& fill_;
  Plan plan_;
  std::vector<Weight> weights_;  // by TensorIndex
  DeviceAddress pages_ = DeviceAddress::kNull;
  std::vector<int32_t> tokens_, positions_, page_table_;
  SequenceRun sequence_{};
  DeviceMemory buffers_;  // values, then the workspace
  std::unique_ptr<Stage> stage_;
};

}  // namespace helm::probe
