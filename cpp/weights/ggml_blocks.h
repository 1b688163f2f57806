// How GGML stores quantised weights: a row is a run of blocks. Little endian, without padding.
// Knows sizes and members; ggml.cc knows what they mean.
#pragma once

#include <cstdint>

// Read where they lie: files align nothing, and memory is bytes.
#define HELM_STORED __attribute__((packed, may_alias))

namespace helm::ggml {

inline constexpr int kBlock = 32;        // columns of a block
inline constexpr int kSuperBlock = 256;  // columns of a block of the K types and of IQ4_XS

// Half: bits of an f16. `qs` of 4 bits hold column j in the low nibble of byte j, and column
// j + 16 in the high one, where nothing else is said.
using Half = uint16_t;

// d (q - 8)
struct HELM_STORED Q4_0 {
  Half d;
  uint8_t qs[16];
};
static_assert(sizeof(Q4_0) == 18);

// d q + m
struct HELM_STORED Q4_1 {
  Half d, m;
  uint8_t qs[16];
};
static_assert(sizeof(Q4_1) == 20);

// d (q - 16); bit j of qh is the fifth of column j
struct HELM_STORED Q5_0 {
  Half d;
  uint8_t qh[4];
  uint8_t qs[16];
};
static_assert(sizeof(Q5_0) == 22);

// d q + m
struct HELM_STORED Q5_1 {
  Half d, m;
  uint8_t qh[4];
  uint8_t qs[16];
};
static_assert(sizeof(Q5_1) == 24);

// d q
struct HELM_STORED Q8_0 {
  Half d;
  int8_t qs[32];
};
static_assert(sizeof(Q8_0) == 34);

// d l q - dmin n per 16 columns; scales: l low, n high nibble. Of each 128 columns the 32 bytes of
// qs hold four runs of 32, two bits each.
struct HELM_STORED Q2_K {
  uint8_t scales[16];
  uint8_t qs[64];
  Half d, dmin;
};
static_assert(sizeof(Q2_K) == 84);

// d (l - 32) (q - 4) per 16 columns; qs as in Q2_K, bit i of hmask[j] is the third of column
// 32 i + j.
struct HELM_STORED Q3_K {
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];
  Half d;
};
static_assert(sizeof(Q3_K) == 110);

// d l q - dmin n per 32 columns; of each 64 columns the 32 bytes of qs hold the first half in low,
// the second in high nibbles.
struct HELM_STORED Q4_K {
  Half d, dmin;
  uint8_t scales[12];
  uint8_t qs[128];
};
static_assert(sizeof(Q4_K) == 144);

// The same; bit i of qh[j] is the fifth of column 32 i + j.
struct HELM_STORED Q5_K {
  Half d, dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
static_assert(sizeof(Q5_K) == 176);

// d l (q - 32) per 16 columns. Of each 128 columns the 64 bytes of ql hold the first half in low,
// the second in high nibbles; the 32 bytes of qh hold four runs of 32, two bits each.
struct HELM_STORED Q6_K {
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  Half d;
};
static_assert(sizeof(Q6_K) == 210);

// d v[q]
struct HELM_STORED IQ4_NL {
  Half d;
  uint8_t qs[16];
};
static_assert(sizeof(IQ4_NL) == 18);

// d (l - 32) v[q] per 32 columns, 16 bytes of qs each; l has four bits in scales_l, two in
// scales_h.
struct HELM_STORED IQ4_XS {
  Half d;
  uint16_t scales_h;
  uint8_t scales_l[4];
  uint8_t qs[128];
};
static_assert(sizeof(IQ4_XS) == 136);

// 2^(e - 128) v[q], v being twice the values of E2M1
struct HELM_STORED Mxfp4 {
  uint8_t e;
  uint8_t qs[16];
};
static_assert(sizeof(Mxfp4) == 17);

}  // namespace helm::ggml
