#include "weights/integer_matrix.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"

namespace helm {
namespace {

// Columns per scale; refuses groups that do not divide the columns.
int64_t group_size(const StoredWeights& weights, int64_t groups) {
  if (groups >= 1 && weights.cols % groups == 0) return weights.cols / groups;
  fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has ", groups,
       " groups of scales for ", weights.cols, " columns, expected a number that divides them");
}

// The groups of the columns; empty where they are in order.
std::vector<int32_t> read_groups(const StoredWeights& weights, const StoredPiece* piece,
                                 int64_t groups) {
  if (piece == nullptr) return {};
  const int64_t size = group_size(weights, groups);
  std::vector<int32_t> group_of(static_cast<size_t>(weights.cols));
  std::memcpy(group_of.data(), piece->bytes.data(), piece->bytes.size());
  // Some writers give every column group -1 where the columns are in order.
  if (std::ranges::all_of(group_of, [](int32_t g) { return g == -1; })) return {};
  bool in_order = true;
  for (int64_t k = 0; k < weights.cols; ++k) {
    const int32_t g = group_of[static_cast<size_t>(k)];
    in_order &= g == k / size;
    if (g >= 0 && g < groups) continue;
    fail(ErrorKind::kInvalid, "[load] tensor \"", weights.name, "\" has group ", g, " for column ",
         k, ", expected 0 to ", groups - 1, "; its g_idx is damaged");
  }
  if (in_order) group_of.clear();
  return group_of;
}

}  // namespace

IntegerMatrix::IntegerMatrix(const StoredWeights& weights, int bits, bool centred,
                             const Scaling& scaling, const StoredPiece* group_of_col)
    : StoredMatrix(weights.name, weights.rows, weights.cols,
                   exact_of(weights, bits, centred, scaling,
                            !read_groups(weights, group_of_col, scaling.groups).empty())),
      scaling_(scaling),
      group_(group_size(weights, scaling.groups)),
      group_of_(read_groups(weights, group_of_col, scaling.groups)) {
  if (is_packed(exact()) && !group_of_.empty()) sort_columns();
}

Format IntegerMatrix::exact_of(const StoredWeights& weights, int bits, bool centred,
                               const Scaling& scaling, bool mixed) {
  const int64_t stored = group_size(weights, scaling.groups);
  const Format dense = format_of(DType::kF32);
  if (mixed && !weights.sort_columns) return dense;
  const Codes codes = bits == 4 ? Codes::kC4 : Codes::kC8;
  const auto middle = static_cast<int16_t>(1 << (bits - 1));
  if (centred && bits == 8 && scaling.groups == 1) return {codes, Scales::kR, 0, middle};
  // One scale per row need not fit a group: it is repeated.
  const int group = scaling.groups == 1 ? 128 : group_for(stored);
  if (group == 0 || scaling.scales.dtype == DType::kF32) return dense;
  Format format{codes, centred ? Scales::kS : Scales::kZ, static_cast<int16_t>(group)};
  if (centred) format.offset = middle;
  format.wide = scaling.scales.dtype == DType::kBF16;
  return format;
}

// Columns of a group side by side, in their order.
void IntegerMatrix::sort_columns() {
  std::vector<int64_t> sizes(static_cast<size_t>(scaling_.groups), 0);
  for (const int32_t g : group_of_) ++sizes[static_cast<size_t>(g)];
  for (size_t g = 0; g < sizes.size(); ++g) {
    if (sizes[g] == group_) continue;
    fail(ErrorKind::kInvalid, "[load] tensor \"", name(), "\" has ", sizes[g], " columns in group ",
         g, ", expected ", group_, " in each; its g_idx is damaged");
  }
  order_.resize(group_of_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return group_of_[static_cast<size_t>(a)] < group_of_[static_cast<size_t>(b)];
  });
}

int64_t IntegerMatrix::group_of(int64_t col) const {
  return group_of_.empty() ? col / group_ : group_of_[static_cast<size_t>(col)];
}

void IntegerMatrix::read_row(int64_t row, float* out) const {
  SpanRow span;
  int64_t group = -1;
  float scale = 0;
  int middle = 0;
  for (int64_t col = 0; col < cols(); col += kSpanCols) {
    const int64_t n = std::min(kSpanCols, cols() - col);
    read_codes(row, 1, col, n, nullptr, &span);
    for (int64_t k = 0; k < n; ++k) {
      if (const int64_t g = group_of(col + k); g != group) {
        group = g;
        scale = scaling_.scales.at(row * scaling_.row_stride + g * scaling_.group_stride);
        middle = zero(row, g);
      }
      out[col + k] = scale * static_cast<float>(span.code[k] - middle);
      if (!(out[col + k] - out[col + k] == 0)) refuse(row, col);
    }
  }
}

void IntegerMatrix::unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const {
  const int64_t own = std::min(n, cols() - col);
  read_codes(row, count, col, own, order_.empty() ? nullptr : order_.data() + col, to);
  const int64_t group = exact().group;
  for (int r = 0; r < count; ++r) {
    std::memset(to[r].code + own, 0, static_cast<size_t>(n - own));
    if (exact().scales == Scales::kR) {
      to[r].row_scale = scaling_.scales.at((row + r) * scaling_.row_stride);
      continue;
    }
    for (int64_t g = 0; g < n / group; ++g) {
      const int64_t stored = std::min((col + g * group) / group_, scaling_.groups - 1);
      const int64_t at = (row + r) * scaling_.row_stride + stored * scaling_.group_stride;
      to[r].s[g] = scaling_.scales.bits(at);
      const int middle = zero(row + r, stored);
      to[r].n[g] = static_cast<uint8_t>(middle);
      if (middle >= 0 && middle <= 255) continue;
      fail(ErrorKind::kInvalid, "[load] tensor \"", name(), "\" has zero point ", middle,
           " in row ", row_name(row + r), ", expected 0 to 255; load it in bf16");
    }
  }
}

}  // namespace helm
