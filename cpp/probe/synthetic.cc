#include "probe/synthetic.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/arena.h"
#include "base/check.h"
#include "cpu/compression.h"
#include "cpu/stage.h"

namespace helm::probe {
namespace {

constexpr int64_t kQkv = (4 + 2) * kKvHeads * kHeadDim;  // 4 query heads per KV head
constexpr int64_t kNarrow = 16;
constexpr float kEps = 1e-6F;
constexpr float kScale = 0.088F;

constexpr std::array<ProductShape, 4> kBlock = {
    {{kQkv, kHidden, 3}, {kHidden, kHidden, 1}, {2 * kInner, kHidden, 2}, {kHidden, kInner, 1}}};

int64_t pages_of(int64_t positions) {
  return (positions + kPageTokens - 1) / kPageTokens;
}

}  // namespace

std::span<const ProductShape> block_products() {
  return kBlock;
}

const std::vector<uint16_t>& noise() {
  static const std::vector<uint16_t> kTile = [] {
    std::vector<uint16_t> tile(size_t{1} << 19);
    uint64_t state = 88172645463325252u;
    for (uint16_t& word : tile) {  // xorshift (Marsaglia 2003)
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      word = static_cast<uint16_t>(0x3C00u | (state & 0x81FFu));
    }
    return tile;
  }();
  return kTile;
}

DeviceAddress Slices::next(int64_t bytes) {
  if (bytes > bytes_) fail(ErrorKind::kInvalid, "[probe] an op exceeds the probe's memory");
  if (at_ + bytes > bytes_) at_ = 0;
  taken_ += bytes;
  return memory_ + std::exchange(at_, align_up(at_ + bytes, kDeviceAlignment));
}

int64_t Slices::caches(DType dtype, int64_t kv_heads, int64_t context) const {
  const KvSpec one{dtype, kPageTokens, {{0, 0, kv_heads}}, kv_heads, kHeadDim, pages_of(context)};
  return std::max<int64_t>(1, half() / (one.blocks * one.page_bytes(0)));
}

Synthetic::Synthetic(Account& account, Slices& slices, const Fill& fill)
    : account_(account), slices_(slices), fill_(fill) {
  plan_.units.resize(1);
  plan_.kv.page_tokens = kPageTokens;
}

ValueIndex Synthetic::value(int64_t width) {
  plan_.values.push_back({"", width, false});
  return static_cast<ValueIndex>(plan_.values.size() - 1);
}

TensorIndex Synthetic::tensor(std::vector<int64_t> shape, const Format& format) {
  TensorSpec spec;
  spec.shape = std::move(shape);
  const auto index = static_cast<TensorIndex>(plan_.tensors.size());
  plan_.slices.push_back({index, false, format, SliceSpec::Access::kResident});
  const DeviceAddress place = slices_.next(format_bytes(format, spec.rows(), spec.cols()));
  weights_.push_back({place, format});
  if (format.codes == Codes::kBF16C) {
    cpu::make_compressed_noise(cpu::host_pointer(place), spec.rows(), spec.cols());
  }
  plan_.tensors.push_back(std::move(spec));
  return index;
}

int64_t Synthetic::cache(DType dtype, int64_t times, int64_t kv_heads, int64_t context) {
  const int64_t pages = pages_of(context);
  plan_.kv = {dtype, kPageTokens, {{0, 0, kv_heads}}, kv_heads, kHeadDim, pages * times};
  pages_ = slices_.next(plan_.kv.blocks * plan_.kv.page_bytes(0));
  return pages;
}

Work Synthetic::add_product(ValueIndex in, ValueIndex out, const ProductShape& shape,
                            const Format& format, int64_t tokens) {
  LinearOp op{in, out, {}, false};
  for (int i = 0; i < shape.parts; ++i) {
    op.parts.push_back({tensor({shape.rows / shape.parts, shape.cols}, format), kNoTensor});
  }
  add(std::move(op));
  const auto elements = static_cast<double>(shape.rows * shape.cols);
  const int64_t bytes = shape.parts * read_bytes(format, shape.rows / shape.parts, shape.cols);
  return {2 * elements * static_cast<double>(tokens), static_cast<double>(bytes)};
}

Work Synthetic::add_attention(ValueIndex qkv, ValueIndex out, int64_t group, int64_t tokens,
                              int64_t context) {
  const int64_t kv_heads = plan_.kv.kv_heads;
  const int64_t heads = group * kv_heads;
  add(AttentionOp{qkv, 0, heads * kHeadDim, (heads + kv_heads) * kHeadDim, out, 0, heads, kv_heads,
                  kHeadDim, kScale, 0});
  const auto n = static_cast<double>(tokens);
  const double pairs = n * static_cast<double>(context - tokens) + n * (n + 1) / 2;
  return {4.0 * static_cast<double>(heads * kHeadDim) * pairs,
          static_cast<double>(2 * context * kv_heads *
                              (plan_.kv.row_bytes() + kv_scale_bytes(plan_.kv.dtype)))};
}

Work Synthetic::add_elementwise(int64_t tokens) {
  const ValueIndex x = value(kHidden);
  const ValueIndex h = value(kHidden);
  const ValueIndex gate_up = value(2 * kInner);
  const ValueIndex inner = value(kInner);
  const TensorIndex weight = tensor({kHidden}, Format{});
  add(NormOp{false, x, 0, h, 0, 1, kHidden, weight, kNoTensor, kEps});
  add(NormOp{false, x, 0, h, 0, 1, kHidden, weight, kNoTensor, kEps});
  add(ActivationOp{ActivationKind::kSilu, true, gate_up, inner, kInner});
  const int64_t floats = tokens * (4 * kHidden + 3 * kInner);
  return {0, static_cast<double>(floats) * sizeof(float)};
}

void Synthetic::add_empty_ops(int64_t ops) {
  const ValueIndex x = value(kNarrow);
  const TensorIndex weight = tensor({kNarrow}, Format{});
  for (int64_t i = 0; i < ops; ++i) {
    add(NormOp{false, x, 0, x, 0, 1, kNarrow, weight, kNoTensor, kEps});
  }
}

// All threads write x, one reads it and writes h, all read h.
void Synthetic::add_handovers(int64_t ops) {
  const ValueIndex y = value(kNarrow), x = value(kHidden), h = value(kHidden);
  const TensorIndex weight = tensor({kHidden}, Format{});
  const TensorIndex widen = tensor({kHidden, kNarrow}, format_of(DType::kBF16));
  const TensorIndex narrow = tensor({kNarrow, kHidden}, format_of(DType::kBF16));
  for (int64_t i = 0; i < ops; i += kHandovers) {
    add(LinearOp{y, x, {{widen, kNoTensor}}, false});
    add(NormOp{false, x, 0, h, 0, 1, kHidden, weight, kNoTensor, kEps});
    add(LinearOp{h, y, {{narrow, kNoTensor}}, false});
  }
}

void Synthetic::compile(int64_t tokens, int64_t context) {
  plan_.limits = {context, tokens, tokens, 1};
  Device& device = account_.device();
  int64_t bytes = 0;
  std::vector<int64_t> offsets;
  for (const ValueSpec& value : plan_.values) {
    offsets.push_back(bytes);
    bytes = align_up(bytes + tokens * value.width * int64_t{sizeof(float)}, kDeviceAlignment);
  }
  const int64_t scratch = device.workspace_bytes(plan_, plan_.units);
  buffers_ = DeviceMemory(account_, bytes + scratch, "the probe");
  fill_(buffers_.address(), bytes);
  StageSpec spec{&plan_, plan_.units, weights_, {}, {}, DeviceAddress::kNull};
  spec.kv.assign(plan_.kv.layers.size(), pages_);
  if (scratch > 0) spec.workspace = buffers_.address() + bytes;
  for (const int64_t offset : offsets) spec.values.push_back(buffers_.address() + offset);
  stage_ = device.compile(spec);
  tokens_.assign(static_cast<size_t>(tokens), 0);
  for (int64_t i = 0; i < tokens; ++i) {
    positions_.push_back(static_cast<int32_t>(context - tokens + i));
  }
  for (int64_t i = 0; i < plan_.kv.blocks; ++i) {
    page_table_.push_back(static_cast<int32_t>(i * plan_.kv.kv_heads));
  }
  sequence_ = {0, tokens, context - tokens, page_table_.data()};
}

void Synthetic::run(Stream& stream, int64_t first_page) const {
  SequenceRun sequence = sequence_;
  sequence.pages += first_page;
  stage_->run(stream, {tokens_, positions_, {}, {&sequence, 1}});
}

}  // namespace helm::probe
