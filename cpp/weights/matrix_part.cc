#include "weights/matrix_part.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"

namespace helm {

MatrixPart::MatrixPart(const StoredMatrix& whole, std::string name, int64_t rows, int64_t cols,
                       int64_t row, int64_t col)
    : StoredMatrix(std::move(name), rows, cols, whole.exact()),
      whole_(whole),
      row_(row),
      col_(col) {
  if (cols == whole.cols() || whole.column_order().empty()) return;
  fail(ErrorKind::kInvalid, "[load] tensor \"", whole.name(), "\" has columns in another order ",
       "than its groups, which cannot be cut; plan without cut layers, or load it in bf16");
}

void MatrixPart::read_row(int64_t row, float* out) const {
  if (cols() == whole_.cols()) return whole_.read_row(row_ + row, out);
  std::vector<float> all(static_cast<size_t>(whole_.cols()));
  whole_.read_row(row_ + row, all.data());
  std::copy_n(all.data() + col_, cols(), out);
}

void MatrixPart::unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const {
  whole_.unpack(row_ + row, count, col_ + col, n, to);
}

}  // namespace helm
