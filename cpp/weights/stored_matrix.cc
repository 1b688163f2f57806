#include "weights/stored_matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "cpu/quantize.h"
#include "helm/tiles.h"

namespace helm {
namespace {

// A z kind as an s kind, whose zero points are all `offset`.
bool is_centred(const Format& to, int64_t n, const SpanRow& row) {
  bool all = true;
  for (int64_t g = 0; g < n / to.group; ++g) all &= row.n[g] == to.offset;
  return all;
}

// One strip of rows from `row` on, those that the matrix has; others become 0.
void repack_strip(const StoredMatrix& from, const Format& format, int64_t row, std::byte* strip) {
  const int count = static_cast<int>(std::min(kStripRows, from.rows() - row));
  SpanRow span[kStripRows];
  std::memset(static_cast<void*>(span), 0, sizeof span);
  for (int64_t col = 0; col < from.cols(); col += kSpanCols) {
    const int64_t n = span_cols(format, from.cols(), col);
    from.unpack(row, count, col, n, span);
    for (int r = 0; r < count; ++r) {
      if (!is_finite(format, n, span[r])) from.refuse(row + r, col);
      if (format == from.exact() || is_centred(format, n, span[r])) continue;
      fail(ErrorKind::kInvalid, "[load] tensor \"", from.name(), "\" cannot become ",
           format_name(format), ": row ", from.row_name(row + r), " has a zero point other than ",
           format.offset, "; expected ", format_name(from.exact()));
    }
    write_span(format, n, span, strip + span_at(format, col));
  }
  write_strip_header(format, span, strip);
}

void convert_rows(const StoredMatrix& from, DType to, const cpu::KernelTable& kernels, int64_t row,
                  int64_t count, std::byte* out) {
  const int64_t cols = from.cols();
  std::vector<float> values(static_cast<size_t>(cols));
  for (int64_t r = row; r < row + count; ++r) {
    std::byte* place = out + (r - row) * cols * dtype_bytes(to);
    from.read_row(r, values.data());
    if (to == DType::kF32) {
      std::memcpy(place, values.data(), values.size() * sizeof(float));
    } else {
      kernels.narrow[static_cast<int>(to)](values.data(), place, cols);
    }
  }
}

void quantize_rows(const StoredMatrix& from, const Format& to, const cpu::KernelTable& kernels,
                   int64_t row, int64_t count, std::byte* out) {
  const int64_t cols = from.cols();
  std::vector<float> values(static_cast<size_t>(kStripRows * cols));
  for (int64_t r = row; r < row + count; r += kStripRows) {
    const int64_t some = std::min(kStripRows, row + count - r);
    for (int64_t i = 0; i < some; ++i) from.read_row(r + i, values.data() + i * cols);
    const auto refused = cpu::quantize_strips(to, DType::kF32, values.data(), some, cols, kernels,
                                              out + strip_at(to, cols, (r - row) / kStripRows));
    if (refused) from.refuse_values(r + *refused, to);
  }
}

}  // namespace

void StoredMatrix::unpack(int64_t, int, int64_t, int64_t, SpanRow*) const {
  fail(ErrorKind::kInvalid, "[load] tensor \"", name_, "\" is stored without codes");
}

void StoredMatrix::read_row(int64_t row, float* out) const {
  SpanRow span;
  float values[kSpanCols];
  for (int64_t col = 0; col < cols_; col += kSpanCols) {
    const int64_t n = span_cols(exact_, cols_, col);
    unpack(row, 1, col, n, &span);
    if (!is_finite(exact_, n, span)) refuse(row, col);
    const int64_t own = std::min(n, cols_ - col);
    if (own == n) {
      span_values(exact_, n, span, out + col);
    } else {
      span_values(exact_, n, span, values);
      std::copy(values, values + own, out + col);
    }
  }
}

std::string StoredMatrix::where() const {
  return (file_.empty() ? "" : file_ + ": ") + "tensor \"" + name_ + "\"";
}

void StoredMatrix::refuse(int64_t row, int64_t col) const {
  fail(ErrorKind::kIo, "[load] ", where(), " has a scale or a weight that is NaN or ",
       "infinite in row ", row_name(row), ", columns ", col, " to ",
       std::min(col + kSpanCols, cols_) - 1,
       ", expected finite ones; the file is damaged or was made wrongly: get it anew");
}

void StoredMatrix::refuse_values(int64_t row, const Format& to) const {
  fail(ErrorKind::kIo, "[load] ", where(), " has weights in row ", row_name(row), " that ",
       format_name(to),
       " cannot hold: NaN, infinite or beyond the scales of f16; load it as stored");
}

bool can_encode(const Format& exact, const Format& to) {
  if (is_dense(to) || to == exact || cpu::quantizes(to)) return true;
  return exact.scales == Scales::kZ && to.scales == Scales::kS && to.codes == exact.codes &&
         to.group == exact.group && to.wide == exact.wide;
}

void refuse_format(const std::string& tensor, const Format& exact, const Format& to) {
  fail(ErrorKind::kInvalid, "[load] tensor \"", tensor, "\" cannot become ", format_name(to),
       ", expected ", format_name(exact),
       ", which holds its values as they are, or f32, f16, bf16, c8.s32, c4.km32");
}

void encode(const StoredMatrix& from, const Format& to, const cpu::KernelTable& kernels,
            int64_t row, int64_t count, std::byte* out) {
  if (!can_encode(from.exact(), to)) refuse_format(from.name(), from.exact(), to);
  if (is_dense(to)) return convert_rows(from, dtype_of(to), kernels, row, count, out);
  if (to != from.exact() && cpu::quantizes(to)) {
    return quantize_rows(from, to, kernels, row, count, out);
  }
  for (int64_t r = row; r < row + count; r += kStripRows) {
    repack_strip(from, to, r, out + strip_at(to, from.cols(), (r - row) / kStripRows));
  }
}

}  // namespace helm
