// A matrix as a checkpoint stores it, in memory, and its way into HELM's formats. Each encoding of
// a checkpoint is a class of its own; what follows from codes and scales alone is here, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "helm/format.h"
#include "weights/span_row.h"

namespace helm {

class StoredMatrix {
 public:
  // name: of the tensor, for errors. exact: holds every value as it is, to the bit. first_row: what
  // errors call row 0, of a part of a tensor.
  StoredMatrix(std::string name, int64_t rows, int64_t cols, const Format& exact,
               int64_t first_row = 0)
      : name_(std::move(name)), rows_(rows), cols_(cols), exact_(exact), first_row_(first_row) {}
  virtual ~StoredMatrix() = default;

  const std::string& name() const { return name_; }
  // Errors name this file, too.
  void comes_from(std::string file) { file_ = std::move(file); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  const Format& exact() const { return exact_; }

  // The values of a row in f32: those of the encoding's published formula, to the bit. out: [cols].
  // Throws Error{kIo} that names the row where a scale or a value is NaN or infinite.
  virtual void read_row(int64_t row, float* out) const;

  // Where exact() is packed: codes and scales of `count` <= 16 rows in the n columns from `col` on;
  // col is a multiple of kSpanCols, n is span_cols(exact(), cols(), col). Columns beyond the last
  // may have any code that does not change from call to call. to: [count].
  virtual void unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const;

  // Column j of unpack() is column order[j] of read_row(); empty where they are the same.
  virtual std::vector<int32_t> column_order() const { return {}; }

  // What errors call a row.
  int64_t row_name(int64_t row) const { return first_row_ + row; }
  // What is wrong with a row in the columns from `col` on.
  [[noreturn]] void refuse(int64_t row, int64_t col) const;
  // Likewise with a row whose values a format cannot hold.
  [[noreturn]] void refuse_values(int64_t row, const Format& to) const;

 private:
  std::string where() const;  // file and tensor, for errors

  std::string name_;
  std::string file_;  // empty: not known
  int64_t rows_;
  int64_t cols_;
  Format exact_;
  int64_t first_row_;
};

// Whether encode() gives this format of a matrix: the exact one, a dense one, one that weights are
// quantised to, or of an exact z kind the s kind, if all zero points turn out to be in the middle.
bool can_encode(const Format& exact, const Format& to);
[[noreturn]] void refuse_format(const std::string& tensor, const Format& exact, const Format& to);

// Rows [row, row + count) in format `to`, the first of them at `out`, aligned to 64. row is a
// multiple of row_unit(to), and so is count, but at the end. Where `to` is exact(), the values stay
// as they are; a dense format rounds each value once; c8.s32 and c4.km32 are quantised from the
// values in f32. Throws as read_row does.
void encode(const StoredMatrix& from, const Format& to, const cpu::KernelTable& kernels,
            int64_t row, int64_t count, std::byte* out);

}  // namespace helm
