// What the keys of a layer have in common before any token is known: the bias of the product that
// makes them, turned by their positions, R(p) b. In some models it is many times as large as the
// rest. An i8 cache holds keys without it, since one scale for both would leave the rest few
// digits; attention adds q . R(p) b to the scores.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "helm/plan.h"

namespace helm::cpu {

struct KeyBias {
  TensorIndex tensor = kNoTensor;
  int64_t offset = 0;  // in the tensor: [kv_heads, head_dim] from there on
  int64_t rotary = 0;  // 0: not turned, hence the same in all scores of a query, and of no effect
  int32_t table = 0;   // of the plan's rope
};

// Of the layer, if the cache holds its keys without it.
std::optional<KeyBias> key_bias(const Plan& plan, int64_t layer);

// Whether that is so of any layer.
bool lacks_key_biases(const Plan& plan);

// Cosines, then sines, of one rope table, for R(p) as a product: p = the first position of a block
// of kKeyBlock keys of a page + a place in it. Positions are multiplied in double, so that R(p)
// does not depend on where pages begin, but for roundings.
struct Turns {
  const float* blocks = nullptr;  // [pages of the context, blocks of a page, rotary]
  const float* places = nullptr;  // [kKeyBlock, rotary]
};

// Bytes of the whole tensor that holds it.
int64_t tensor_bytes(const Plan& plan, const KeyBias& bias);

// Of all rope tables; 0 where no layer needs them.
int64_t turn_bytes(const Plan& plan);
std::vector<Turns> fill_turns(const Plan& plan, std::byte* memory);

inline int64_t key_blocks(const KvSpec& kv) {
  return (kv.page_tokens + kKeyBlock - 1) / kKeyBlock;
}

}  // namespace helm::cpu
