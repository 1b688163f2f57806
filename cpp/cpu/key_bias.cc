#include "cpu/key_bias.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "base/arena.h"

namespace helm::cpu {
namespace {

int64_t rows_of(const Plan& plan, TensorIndex tensor) {
  return plan.tensors[static_cast<size_t>(tensor)].shape[0];
}

// Follows one layer's keys through the ops of its unit.
class Keys {
 public:
  Keys(const Plan& plan, const AttentionOp& op)
      : plan_(plan), op_(op), begin_(op.k_offset), end_(begin_ + op.kv_heads * op.head_dim) {}

  void after(const Op& op) {
    if (const auto* linear = std::get_if<LinearOp>(&op)) made_by(*linear);
    if (const auto* norm = std::get_if<NormOp>(&op)) {
      if (norm->out == op_.in && overlap(norm->out_offset, norm->groups * norm->size)) {
        found_.reset();
      }
    }
    if (const auto* rope = std::get_if<RopeOp>(&op)) turned_by(*rope);
  }
  const std::optional<KeyBias>& found() const { return found_; }

 private:
  bool overlap(int64_t offset, int64_t size) const {
    return offset < end_ && begin_ < offset + size;
  }

  void made_by(const LinearOp& linear) {
    if (linear.out != op_.in) return;
    found_.reset();
    int64_t row = 0;
    for (const LinearOp::Part& part : linear.parts) {
      const int64_t rows = rows_of(plan_, part.weight);
      if (row <= begin_ && end_ <= row + rows && part.bias != kNoTensor && !linear.accumulate) {
        found_ = KeyBias{part.bias, begin_ - row, 0, 0};
      }
      row += rows;
    }
  }

  void turned_by(const RopeOp& rope) {
    if (!found_ || rope.value != op_.in || !overlap(rope.offset, rope.heads * rope.head_dim)) {
      return;
    }
    const bool whole = rope.head_dim == op_.head_dim && rope.offset <= begin_ &&
                       (begin_ - rope.offset) % rope.head_dim == 0 &&
                       end_ <= rope.offset + rope.heads * rope.head_dim && found_->rotary == 0 &&
                       !rope.neighbours;
    if (!whole) return found_.reset();
    found_->rotary = rope.rotary;
    found_->table = rope.table;
  }

  const Plan& plan_;
  const AttentionOp& op_;
  int64_t begin_, end_;  // of the keys in a row of op.in
  std::optional<KeyBias> found_;
};

std::optional<KeyBias> key_bias_in(const Plan& plan, const UnitSpec& unit, const AttentionOp& op) {
  Keys keys(plan, op);
  for (const Op& before : unit.ops) {
    if (std::holds_alternative<AttentionOp>(before)) break;
    keys.after(before);
  }
  return keys.found();
}

// Calls with each attention op of the plan and its unit.
template <typename Call>
void each_attention(const Plan& plan, const Call& call) {
  if (kv_scale_bytes(plan.kv.dtype) == 0) return;
  for (const UnitSpec& unit : plan.units) {
    for (const Op& op : unit.ops) {
      if (const auto* attention = std::get_if<AttentionOp>(&op)) call(unit, *attention);
    }
  }
}

int64_t blocks_of(const Plan& plan) {
  const int64_t tokens = plan.kv.page_tokens;
  return (plan.limits.context + tokens - 1) / tokens * key_blocks(plan.kv);
}

int64_t table_floats(const Plan& plan, const RopeTable& table) {
  const int64_t row = 2 * std::ssize(table.inv_freq);
  return align_up((blocks_of(plan) + kKeyBlock) * row * int64_t{sizeof(float)}, kCacheLine) /
         int64_t{sizeof(float)};
}

void fill_row(const RopeTable& table, int64_t position, float factor, float* row) {
  const size_t half = table.inv_freq.size();
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(table.inv_freq[i]);
    row[i] = static_cast<float>(std::cos(angle)) * factor;
    row[half + i] = static_cast<float>(std::sin(angle)) * factor;
  }
}

}  // namespace

std::optional<KeyBias> key_bias(const Plan& plan, int64_t layer) {
  std::optional<KeyBias> found;
  each_attention(plan, [&](const UnitSpec& unit, const AttentionOp& op) {
    if (op.layer == layer) found = key_bias_in(plan, unit, op);
  });
  return found;
}

bool lacks_key_biases(const Plan& plan) {
  bool any = false;
  each_attention(plan, [&](const UnitSpec& unit, const AttentionOp& op) {
    any = any || key_bias_in(plan, unit, op).has_value();
  });
  return any;
}

int64_t tensor_bytes(const Plan& plan, const KeyBias& bias) {
  return rows_of(plan, bias.tensor) * int64_t{sizeof(float)};
}

int64_t turn_bytes(const Plan& plan) {
  if (!lacks_key_biases(plan)) return 0;
  int64_t floats = 0;
  for (const RopeTable& table : plan.rope) floats += table_floats(plan, table);
  return floats * int64_t{sizeof(float)};
}

std::vector<Turns> fill_turns(const Plan& plan, std::byte* memory) {
  std::vector<Turns> turns;
  auto* next = reinterpret_cast<float*>(memory);
  const int64_t page_blocks = key_blocks(plan.kv), blocks = blocks_of(plan);
  for (const RopeTable& table : plan.rope) {
    const int64_t row = 2 * std::ssize(table.inv_freq);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b / page_blocks * plan.kv.page_tokens + b % page_blocks * kKeyBlock;
      fill_row(table, first, table.attention_factor, next + b * row);
    }
    float* places = next + blocks * row;
    for (int64_t i = 0; i < kKeyBlock; ++i) fill_row(table, i, 1, places + i * row);
    turns.push_back({next, places});
    next += table_floats(plan, table);
  }
  return turns;
}

}  // namespace helm::cpu
