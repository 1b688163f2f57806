// The contract between the CPU stage and the vector kernels: one table of functions per ISA tier.
// Knows nothing of graphs, pages, threads or plans; every function works on the slice it is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/compressed.h"
#include "helm/types.h"

namespace helm::cpu {

// Memory that a caller reads after a product. A kernel that computes longer than it reads may ask
// for it meanwhile, and takes what it has asked for off the front.
struct ReadAfter {
  struct Stretch {
    const std::byte* at;
    int64_t bytes;
  };
  Stretch* first;
  Stretch* end;
};

// C(t, r) = [C(t, r) +] [bias(r) +] sum_k A(t, k) * W(r, k)      t < tokens, r < rows
//
// A is rounded to KernelTable::activations of the weights' dtype first. Accumulates in f32. The
// value of C(t, r) depends on row t of A and row r of W alone: it is bit-identical for every
// `tokens` and for every split of the rows over calls, so that batched equals single and chunked
// prefill equals prefill at once.
struct MatmulArgs {
  const float* a;    // [tokens, cols], rows a_stride apart
  int64_t a_stride;  // elements
  int64_t tokens;
  const void* w;  // [rows, cols] contiguous, of the table entry's dtype, any alignment of rows
  int64_t rows;
  int64_t cols;
  const float* bias;  // [rows] or null
  bool accumulate;    // add to what C holds
  float* c;           // [tokens, rows], rows c_stride apart
  int64_t c_stride;   // elements
  void* scratch;      // KernelTable::scratch_bytes, 64-byte aligned, private to the calling thread
  const void* packed = nullptr;  // all tiles of A; for more tokens than KernelTable::direct_tokens
  // Of kDecodeTokens tokens at most the call computes one slice of the rows; all slices together
  // compute each row once. Which rows are whose is up to the kernel, which goes on where the slice
  // before has stopped reading.
  int64_t slice = 0;
  int64_t slices = 1;
  // Of kDecodeTokens at most: the last call with this scratch had the same A, tokens and cols, and
  // weights of the same dtype. What it made of A is there still.
  bool same_input = false;
  ReadAfter* after = nullptr;  // the calling thread's, or null
};

// A for products of many tokens, as their kernel reads it: packed once, in tiles of tokens that
// threads may share out, and read by all of them.
struct PackArgs {
  const float* a;    // [tokens, cols], rows a_stride apart
  int64_t a_stride;  // elements
  int64_t tokens;
  int64_t cols;
  void* packed;  // packed_bytes(tokens, cols), 64-byte aligned
};

// At least what any tier takes.
constexpr int64_t packed_bytes(int64_t tokens, int64_t cols) {
  return tokens * ((cols + 31) / 32 * 32) * static_cast<int64_t>(sizeof(float));
}

inline constexpr int64_t kKeyBlock =
    128;  // keys at once: a tile's scores, K and V of them stay in L2

// A run of consecutive cached positions of one KV head.
struct KvSpan {
  const void* k;  // [count, head_dim] contiguous
  const void* v;  // [count, head_dim] contiguous
  // [count], by which a row's elements count; null but for i8
  const float* k_scale;
  const float* v_scale;
  int64_t count;
};

// Partial attention of one KV head's query heads over one span of cached positions:
//   score(i, g, j) = cap(scale * sum_d Q(i, g, d) * K(j, d))     masked unless
//                    0 <= position(i) - (first_key + j)  and  < window (when window > 0)
//   cap(x) = softcap * tanh(x / softcap), or x where softcap is 0
//   m = max_j score, s = sum_j exp(score - m), o(d) = sum_j exp(score - m) * V(j, d)
// scale * Q and the weights of V are rounded to KernelTable::activations of the dtype of K and V.
// A fully masked row gives m = -inf, s = 0, o = 0. Values for a (query, head) do not depend on how
// many queries the call has. Softmax partials merge exactly (Milakov and Gimelshein 2018).
struct AttentionArgs {
  const float* q;    // Q(i, g, d) at q + i * q_stride + g * head_dim + d
  int64_t q_stride;  // elements between consecutive query tokens
  int64_t queries;   // consecutive tokens; position(i) = first_query + i
  int64_t group;     // query heads per KV head
  int64_t head_dim;
  int64_t first_query;  // absolute position of query 0
  int64_t first_key;    // absolute position of span element 0
  int64_t window;       // sliding window in positions, 0 = unlimited
  float scale;
  KvSpan span;
  KvSpan next;    // what the thread attends to after this, to be fetched meanwhile; k null: nothing
  float* m;       // [queries, group] out
  float* s;       // [queries, group] out
  float* o;       // [queries, group, head_dim] out, not normalised
  void* scratch;  // KernelTable::scratch_bytes

  // Of i8, whose K may lack R(first_key + j) B, to be added to every row: B turned by position, as
  // by RopeArgs, in its first `rotary` elements, and zero in others.
  const float* bias = nullptr;  // B, [head_dim], or null
  int64_t rotary = 0;
  // Cosines, then sines, [rotary]: of the position of every kKeyBlock-th key of the span, times a
  // factor of R; and of positions 0 to kKeyBlock - 1.
  const float* block_turns = nullptr;
  const float* place_turns = nullptr;
  float softcap = 0;
};

// Y(t, g, :) [+]= norm(X(t, g, :)) * (weight_plus + weight) [+ bias], groups of n elements, group g
// at t*stride + g*n.
// rms:   x / sqrt(mean(x^2) + eps)          layer: (x - mean) / sqrt(var + eps)
struct NormArgs {
  const float* x;
  int64_t x_stride;
  float* y;  // may equal x
  int64_t y_stride;
  int64_t tokens;
  int64_t groups;
  int64_t n;
  const float* weight;  // [n]
  const float* bias;    // [n] or null (layer norm only)
  float eps;
  float weight_plus = 0;
  bool accumulate = false;  // add to what Y holds
};

// Rotates the first `rotary` elements of each head in place, halves (i, i + rotary/2) or neighbours
// (2i, 2i + 1) paired:
//   x1' = x1*cos - x2*sin,  x2' = x2*cos + x1*sin
struct RopeArgs {
  float* x;  // head h of token t at t * stride + h * head_dim
  int64_t stride;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t rotary;    // even, <= head_dim
  const float* cos;  // [tokens, rotary / 2]
  const float* sin;  // [tokens, rotary / 2]
  bool neighbours = false;
};

// kScale: factor * x; kSoftcap: factor * tanh(x / factor); kSwigluLimit, gated alone: X's gate is
// bounded by factor above, up by factor on both sides, act(x) = x / (1 + exp(-1.702 x)), and 1 is
// added to up
enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh, kRelu, kScale, kSoftcap, kSwigluLimit };

// gated: Y(t, i) [+]= act(X(t, i)) * X(t, n + i)   (X is [tokens, 2n]: gate, then up)
// plain: Y(t, i) [+]= act(X(t, i))                 (X is [tokens, n])
struct ActivationArgs {
  Activation kind;
  bool gated;
  const float* x;
  int64_t x_stride;
  float* y;  // may equal x
  int64_t y_stride;
  int64_t tokens;
  int64_t n;
  float factor = 1;
  bool accumulate = false;  // add to what Y holds
};

// Above this many rows of input a product is bound by arithmetic; up to it no tier packs them.
constexpr int64_t kDecodeTokens = 8;

constexpr int kReadProbes = 3;

// All kernels of one ISA tier. Arrays are indexed by DType.
struct KernelTable {
  const char* name;                            // "scalar", "avx2", "avx512", "avx512bf16", "amx"
  int64_t (*scratch_bytes)(int64_t head_dim);  // of attention, if there is any
  void (*matmul[kDTypes])(const MatmulArgs&);
  // As matmul with bf16 weights, bit by bit; MatmulArgs::w is not read.
  void (*matmul_compressed)(const MatmulArgs&, const CompressedMatrix&);
  // Compresses a row of bf16 weights: writes its chunks, zeros behind the last column, and the base
  // of its high bytes; returns how many escapes it has, of which at most `room` are written.
  int64_t (*compress_row)(const uint16_t* w, int64_t cols, std::byte* chunks, uint8_t* base,
                          Escape* escapes, int64_t room);
  Place (*compressed_place)(int weight);  // of a chunk
  // Up to so many tokens matmul reads A, beyond them `packed`, of which pack makes the given tile
  // of `tile_tokens` at most.
  int64_t direct_tokens[kDTypes];
  // Of more tokens than these, and kDecodeTokens at most, products may take MatmulArgs::after.
  int64_t read_after_tokens[kDTypes];
  int64_t tile_tokens;
  void (*pack[kDTypes])(const PackArgs&, int64_t tile);
  // What matmul, and attention over such keys and values, round their f32 inputs and the softmax's
  // weights to: f32, or less to be faster.
  DType activations[kDTypes];
  void (*attention[kKvDTypes])(const AttentionArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*layer_norm)(const NormArgs&);
  void (*rope)(const RopeArgs&);
  void (*activation)(const ActivationArgs&);
  // Merges partial b into a: [rows] maxima and sums, [rows, head_dim] outputs.
  void (*attention_merge)(int64_t rows, int64_t head_dim, float* m_a, float* s_a, float* o_a,
                          const float* m_b, const float* s_b, const float* o_b);
  // o(row, :) /= s(row)
  void (*attention_finish)(int64_t rows, int64_t head_dim, const float* s, float* o);
  void (*widen[kDTypes])(const void* src, float* dst, int64_t n);   // dtype -> f32
  void (*narrow[kDTypes])(const float* src, void* dst, int64_t n);  // f32 -> dtype, nearest even
  // q = round(x / scale) to the nearest, ties to even, with the scale max |x| / 127 that it
  // returns. 0 and zeros where the scale would be denormal, NaN and zeros where an x is not finite.
  float (*quantize)(const float* x, int8_t* q, int64_t n);
  void (*add)(const float* x, float* y, int64_t n);  // y += x
  // For probes: runs `rounds` of register-only FMAs and returns how many flops that was.
  double (*probe_fma)(int64_t rounds, float* sink);
  // For probes: read [p, p + bytes), bytes a multiple of 4096, as one thread of some machine can
  // best; which way is the fastest depends on the machine, and on its neighbours.
  void (*probe_read[kReadProbes])(const void* p, int64_t bytes, float* sink);
};

// Tiles to pack before a product of so many tokens; 0 where it reads A.
inline int64_t tiles_to_pack(const KernelTable& table, DType weights, int64_t tokens) {
  if (tokens <= table.direct_tokens[static_cast<int>(weights)]) return 0;
  return (tokens + table.tile_tokens - 1) / table.tile_tokens;
}

// Each is the one exported symbol of its file; null where the tier was not compiled for this
// target.
const KernelTable* kernels_scalar();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx512bf16();
const KernelTable* kernels_amx();

}  // namespace helm::cpu
