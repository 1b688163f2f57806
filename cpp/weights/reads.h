// Where the rows of tensors are stored, and the reads that a load consists of. Knows no devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "helm/encode.h"
#include "helm/engine.h"
#include "helm/plan.h"
#include "helm/stored.h"
#include "weights/files.h"
#include "weights/first_touch.h"
#include "weights/stored_matrix.h"

namespace helm {

// The rows of one tensor, in memory that was bound to it or in the extents of files. A vector has
// rows of one element. Of a part of a tensor it finds the rectangle in what is stored of the whole.
class StoredTensor {
 public:
  // Throws Error{kInvalid} for a bound tensor that does not fit the plan, and for one without any
  // source; Error{kIo} for a file that is missing or too short.
  StoredTensor(const TensorSpec& spec, const EngineOptions& options, WeightFiles& files);

  const TensorSpec& spec() const { return *spec_; }
  Stored stored() const { return stored_; }
  // Whether stored bytes of whole rows, of whole strips, are those of a slice.
  bool same_bytes(const Format& format) const;
  // Whether the rows adjoin where they are bound.
  bool whole_rows() const { return spec_->cols() == cols_; }
  int64_t row_bytes() const { return row_bytes_; }
  // What was bound; null where the tensor lies in files.
  const TensorView* view() const { return view_; }
  // In memory: the stored bytes of a row and of those that follow. Null for others, and where some
  // of the rows' columns are elsewhere.
  const std::byte* memory(int64_t row) const;
  // The only file and where the tensor begins there, of one extent of whole rows.
  const WeightFile& file() const { return *extents_.front().file; }
  // For errors: the file of a row, or the first of a matrix in pieces; empty where it is bound.
  std::string_view file_of(int64_t row) const;
  int64_t offset() const { return extents_.front().offset; }

  // What is not converted row by row: a matrix in the pages of its files. Null but after open(),
  // which throws Error{kInvalid} for pieces that do not go together or cannot become `format`.
  const StoredMatrix* matrix() const { return matrix_.get(); }
  void open(const Format& format);

  // Throws Error{kIo} that names file and element where elements of a vector from `row` on are NaN
  // or infinite.
  void check_finite(int64_t row, std::span<const float> elements) const;

  // The stored bytes of rows [row, row + count), one row after the other; of strips, whole ones.
  void read(int64_t row, int64_t count, std::byte* to) const;

 private:
  struct Extent {
    const WeightFile* file;
    int64_t first_row;
    int64_t rows;
    int64_t offset;
    int64_t row_stride;
  };

  void check_bound() const;
  void find_extents(WeightFiles& files);
  void find_pieces(WeightFiles& files);
  std::unique_ptr<StoredMatrix> open_whole();
  std::unique_ptr<StoredMatrix> open_aux();
  const std::byte* bound_row(int64_t row) const;
  const Extent& extent_of(int64_t row) const;
  void read_rows(const Extent& extent, int64_t first, int64_t count, std::byte* to) const;

  const TensorSpec* spec_;
  const std::string& name_;  // of the whole, with
  const int64_t rows_, cols_;
  int64_t first_row_ = 0, first_col_ = 0;  // there
  const TensorView* view_ = nullptr;
  Stored stored_;
  int64_t row_bytes_;                   // of the part's columns
  std::vector<Extent> extents_;         // ascending; empty where the tensor is bound
  std::vector<const WeightFile*> aux_;  // the files of pieces
  std::vector<std::shared_ptr<MappedFile>> pages_;
  StoredWeights weights_;  // what the matrix refers to
  std::unique_ptr<StoredMatrix> whole_;
  std::unique_ptr<StoredMatrix> matrix_;  // of the whole, or of the part
};

class Sink;

// One transfer: some rows of a tensor to their sink.
struct Read {
  const StoredTensor* from;
  Sink* to;
  int64_t row;
  int64_t rows;
  int owner;  // the member that should do it, or kAnyone
};

// Adds reads of all rows that the shares cover, of one owner and about `elements` elements each:
// whole multiples of `row_unit` rows, but at the end.
void cut(const StoredTensor& from, Sink& to, const std::vector<TensorShare>& shares,
         int64_t row_unit, int64_t elements, std::vector<Read>& reads);

}  // namespace helm
