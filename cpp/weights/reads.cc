#include "weights/reads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "base/check.h"
#include "weights/finite.h"
#include "weights/matrix_part.h"
#include "weights/packed.h"
#include "weights/pieces.h"

namespace helm {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

const TensorView* bound(const std::string& name, const TensorSpec& spec,
                        const EngineOptions& options) {
  const auto it = options.tensors.find(name);
  if (it != options.tensors.end()) return &it->second;
  if (spec.source) return nullptr;
  fail(ErrorKind::kInvalid, "[load] tensor \"", name,
       "\" has no source file in the plan and was not bound from memory; add it to ",
       "EngineOptions::tensors");
}

}  // namespace

StoredTensor::StoredTensor(const TensorSpec& spec, const EngineOptions& options, WeightFiles& files)
    : spec_(&spec),
      name_(spec.part ? spec.part->tensor : spec.name),
      rows_(spec.part ? spec.part->shape[0] : spec.rows()),
      cols_(!spec.is_matrix() ? 1
            : spec.part       ? spec.part->shape[1]
                              : spec.cols()),
      view_(bound(name_, spec, options)) {
  if (spec.part) first_row_ = spec.part->row, first_col_ = spec.part->col;
  if (view_ != nullptr) check_bound();
  stored_ = view_ != nullptr ? stored_of(view_->dtype) : spec.source->stored;
  row_bytes_ = is_pieces(stored_) ? 0 : stored_bytes(stored_, spec.cols());
  if (view_ != nullptr) return;
  find_pieces(files);
  find_extents(files);
}

// Those with rows of this tensor. Rows in strips are read from the first of one on.
void StoredTensor::find_extents(WeightFiles& files) {
  const int64_t whole_bytes = is_pieces(stored_) ? 0 : stored_bytes(stored_, cols_);
  const int64_t begin = is_packed(stored_) ? first_row_ / kStripRows * kStripRows : first_row_;
  const int64_t end = first_row_ + spec_->rows();
  int64_t row = 0;  // of the whole
  for (const SourceExtent& extent : spec_->source->extents) {
    const WeightFile& file = files.of(extent.file);
    const int64_t stride = extent.row_stride > 0 ? extent.row_stride : whole_bytes;
    const int64_t last = extent.offset + (stored_rows(stored_, extent.rows) - 1) * stride;
    if (last + whole_bytes > file.bytes()) {
      fail(ErrorKind::kIo, "[load] ", file.path(), " has ", file.bytes(), " bytes, tensor \"",
           name_, "\" ends at ", last + whole_bytes,
           "; the file is truncated or not the planned one");
    }
    const int64_t from = std::max(row, begin), to = std::min(row + extent.rows, end);
    if (from < to) {
      const int64_t col_bytes = is_packed(stored_) ? 0 : stored_bytes(stored_, first_col_);
      extents_.push_back({&file, from - begin, stored_rows(stored_, to - from),
                          extent.offset + (from - row) * stride + col_bytes, stride});
    }
    row += extent.rows;
  }
}

void StoredTensor::find_pieces(WeightFiles& files) {
  for (const SourcePiece& piece : spec_->source->aux) {
    const WeightFile& file = files.of(piece.file);
    if (piece.offset + piece.bytes() > file.bytes()) {
      fail(ErrorKind::kIo, "[load] ", file.path(), " has ", file.bytes(), " bytes, the ",
           piece.name, " of tensor \"", name_, "\" ends at ", piece.offset + piece.bytes(),
           "; the file is truncated or not the planned one");
    }
    aux_.push_back(&file);
  }
}

bool StoredTensor::same_bytes(const Format& format) const {
  const bool strips = whole_rows() && first_row_ % kStripRows == 0;
  return helm::same_bytes(stored_, format) && (!is_packed(stored_) || strips);
}

void StoredTensor::open(const Format& format) {
  if (matrix_ == nullptr && (is_packed(stored_) || is_pieces(stored_))) {
    matrix_ = open_whole();
    matrix_->comes_from(std::string(file_of(0)));
    if (spec_->part) {
      whole_ = std::move(matrix_);
      matrix_ = std::make_unique<MatrixPart>(*whole_, spec_->name, spec_->rows(), spec_->cols(),
                                             first_row_, first_col_);
      matrix_->comes_from(std::string(file_of(0)));
    }
  }
  if (matrix_ == nullptr || !is_packed(format)) return;
  if (!can_encode(matrix_->exact(), format)) refuse_format(spec_->name, matrix_->exact(), format);
}

std::unique_ptr<StoredMatrix> StoredTensor::open_whole() {
  if (is_pieces(stored_)) return open_aux();
  pages_.push_back(file().map());
  const std::byte* first = pages_[0]->data() + spec_->source->extents[0].offset;
  return std::make_unique<PackedMatrix>(name_, row_of(stored_).exact, first, rows_, cols_);
}

std::unique_ptr<StoredMatrix> StoredTensor::open_aux() {
  weights_.name = name_;
  weights_.stored = stored_name(stored_);
  weights_.rows = rows_;
  weights_.cols = cols_;
  for (size_t i = 0; i < aux_.size(); ++i) {
    const SourcePiece& piece = spec_->source->aux[i];
    pages_.push_back(aux_[i]->map());
    const std::span<const std::byte> bytes(pages_.back()->data() + piece.offset,
                                           static_cast<size_t>(piece.bytes()));
    weights_.pieces[piece.name] = {piece.dtype, piece.shape, bytes};
  }
  return open_pieces(weights_);
}

void StoredTensor::check_bound() const {
  const std::vector<int64_t>& shape = spec_->part ? spec_->part->shape : spec_->shape;
  if (view_->shape != shape) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", name_, "\" has shape ", shape_text(view_->shape),
         ", the plan says ", shape_text(shape));
  }
  if (view_->data == nullptr || static_cast<int>(view_->dtype) >= kDTypes) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", name_, "\" was bound ",
         view_->data == nullptr ? "without data" : "in a dtype of the KV cache",
         "; expected f32, f16 or bf16 in memory");
  }
}

const std::byte* StoredTensor::bound_row(int64_t row) const {
  return static_cast<const std::byte*>(view_->data) +
         stored_bytes(stored_, (first_row_ + row) * cols_ + first_col_);
}

const std::byte* StoredTensor::memory(int64_t row) const {
  return view_ != nullptr && whole_rows() ? bound_row(row) : nullptr;
}

// Rows that adjoin are one transfer. So are rows with little between them: a call of the system for
// each takes longer than reading what is skipped.
void StoredTensor::read_rows(const Extent& extent, int64_t first, int64_t count,
                             std::byte* to) const {
  const int64_t stride = extent.row_stride, offset = extent.offset + first * stride;
  if (stride == row_bytes_) return extent.file->read(to, count * row_bytes_, offset);
  constexpr int64_t kBufferBytes = int64_t{1} << 18;
  const bool near = stride <= 4 * row_bytes_;
  const int64_t at_once = near ? std::clamp<int64_t>(kBufferBytes / stride, 1, count) : 1;
  std::vector<std::byte> all(static_cast<size_t>((at_once - 1) * stride + row_bytes_));
  for (int64_t r = 0; r < count; r += at_once) {
    const int64_t some = std::min(at_once, count - r);
    extent.file->read(all.data(), (some - 1) * stride + row_bytes_, offset + r * stride);
    for (int64_t i = 0; i < some; ++i) {
      std::memcpy(to + (r + i) * row_bytes_, all.data() + i * stride,
                  static_cast<size_t>(row_bytes_));
    }
  }
}

const StoredTensor::Extent& StoredTensor::extent_of(int64_t row) const {
  const auto after = std::upper_bound(extents_.begin(), extents_.end(), row,
                                      [](int64_t r, const Extent& e) { return r < e.first_row; });
  return *std::prev(after);
}

std::string_view StoredTensor::file_of(int64_t row) const {
  if (!aux_.empty()) return aux_.front()->path();
  return extents_.empty() ? std::string_view() : extent_of(row).file->path();
}

void StoredTensor::check_finite(int64_t row, std::span<const float> elements) const {
  const auto count = static_cast<int64_t>(elements.size());
  const auto* bits = reinterpret_cast<const uint32_t*>(elements.data());
  if (all_finite(bits, count, kExponentF32)) return;
  const auto bad = std::find_if_not(elements.begin(), elements.end(),
                                    [](float value) { return std::isfinite(value); });
  fail(
      ErrorKind::kIo, "[load] ", file_of(row), ": tensor \"", spec_->name, "\" is ", *bad,
      " at element ", row + (bad - elements.begin()),
      ", expected no NaN or infinite weight; the file is damaged or was made wrongly: get it anew");
}

void StoredTensor::read(int64_t row, int64_t count, std::byte* to) const {
  if (view_ != nullptr) {
    const int64_t at_once = whole_rows() ? count : 1;
    for (int64_t r = 0; r < count; r += at_once) {
      std::memcpy(to + r * row_bytes_, bound_row(row + r),
                  static_cast<size_t>(at_once * row_bytes_));
    }
    return;
  }
  count = stored_rows(stored_, count);
  for (const Extent* extent = &extent_of(row); count > 0; ++extent) {
    const int64_t skipped = row - extent->first_row;
    const int64_t some = std::min(count, extent->rows - skipped);
    read_rows(*extent, skipped, some, to);
    to += some * row_bytes_;
    row += some;
    count -= some;
  }
}

void cut(const StoredTensor& from, Sink& to, const std::vector<TensorShare>& shares,
         int64_t row_unit, int64_t elements, std::vector<Read>& reads) {
  const int64_t units = std::max<int64_t>(1, elements / from.spec().cols() / row_unit);
  const int64_t most = units * row_unit;
  for (const TensorShare& share : shares) {
    for (int64_t row = share.begin; row < share.end; row += most) {
      reads.push_back({&from, &to, row, std::min(most, share.end - row), share.member});
    }
  }
}

}  // namespace helm
