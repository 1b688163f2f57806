// Builds the kernel table of one vector type. An ISA file instantiates it and exports the result.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/compress_row.h"
#include "cpu/kernels/elementwise.h"
#include "cpu/kernels/matmul.h"
#include "cpu/kernels/probe.h"

namespace helm::cpu {
namespace {

template <class V>
int64_t scratch_bytes(int64_t head_dim) {
  using P = Dot<V, DType::kF32>;
  return max_of(panel_scratch_bytes<P>() + plain_scratch_bytes<P>(),
                attention_scratch_bytes<V>(head_dim));
}

template <class V>
constexpr KernelTable make_table(const char* name) {
  constexpr DType f32 = DType::kF32, f16 = DType::kF16, bf16 = DType::kBF16;
  static_assert(V::kDirectTokens >= kDecodeTokens);
  KernelTable t{};
  t.name = name;
  t.scratch_bytes = scratch_bytes<V>;
  t.matmul[0] = matmul<V, f32>, t.matmul[1] = matmul<V, f16>, t.matmul[2] = matmul<V, bf16>;
  t.matmul_compressed = matmul_compressed<V>;
  t.compress_row = compress_row<Dot<V, bf16>>;
  t.compressed_place = Dot<V, bf16>::place;
  t.direct_tokens[0] = t.direct_tokens[1] = t.direct_tokens[2] = V::kDirectTokens;
  for (int64_t& tokens : t.read_after_tokens) {
    tokens = V::kRowsAdjoin ? V::kDirectTile : kDecodeTokens;
  }
  t.tile_tokens = V::kPanelTokens;
  t.pack[0] = t.pack[1] = t.pack[2] = pack_tokens<Dot<V, f32>>;
  t.activations[0] = t.activations[1] = t.activations[2] = f32;
  t.attention[0] = attention<V, f32>, t.attention[1] = attention<V, f16>;
  t.attention[2] = attention<V, bf16>, t.attention[3] = attention<V, DType::kI8>;
  t.rms_norm = rms_norm<V>;
  t.layer_norm = layer_norm<V>;
  t.rope = rope<V>;
  t.activation = activation<V>;
  t.attention_merge = attention_merge<V>;
  t.attention_finish = attention_finish<V>;
  t.widen[0] = widen<V, f32>, t.widen[1] = widen<V, f16>, t.widen[2] = widen<V, bf16>;
  t.narrow[0] = narrow<V, f32>, t.narrow[1] = narrow<V, f16>, t.narrow[2] = narrow<V, bf16>;
  t.quantize = quantize<V>;
  t.add = add<V>;
  t.probe_fma = probe_fma<V>;
  // More lines in flight than one stream's prefetcher keeps; one stream, for the fewest pages; and
  // a few, of which a core may keep track best.
  t.probe_read[0] = probe_read<V, 8, 0, 1024>, t.probe_read[1] = probe_read<V, 1, 4096, 512>;
  t.probe_read[2] = probe_read<V, 3, 0, 1024>;
  return t;
}

}  // namespace
}  // namespace helm::cpu
