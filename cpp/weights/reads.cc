#include "weights/reads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "base/check.h"
#include "weights/finite.h"
#include "weights/packed.h"
#include "weights/pieces.h"

namespace helm {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

const TensorView* bound(const TensorSpec& spec, const EngineOptions& options) {
  const auto it = options.tensors.find(spec.name);
  if (it != options.tensors.end()) return &it->second;
  if (spec.source) return nullptr;
  fail(ErrorKind::kInvalid, "[load] tensor \"", spec.name,
       "\" has no source file in the plan and was not bound from memory; add it to ",
       "EngineOptions::tensors");
}

}  // namespace

StoredTensor::StoredTensor(const TensorSpec& spec, const EngineOptions& options, WeightFiles& files)
    : spec_(&spec), view_(bound(spec, options)) {
  if (view_ != nullptr) check_bound();
  stored_ = view_ != nullptr ? stored_of(view_->dtype) : spec.source->stored;
  row_bytes_ = is_pieces(stored_) ? 0 : stored_bytes(stored_, spec.cols());
  if (view_ != nullptr) return;
  find_pieces(files);
  int64_t row = 0;
  for (const SourceExtent& extent : spec.source->extents) {
    const WeightFile& file = files.of(extent.file);
    const int64_t stride = extent.row_stride > 0 ? extent.row_stride : row_bytes_;
    const int64_t rows = stored_rows(stored_, extent.rows);
    const int64_t end = extent.offset + (rows - 1) * stride + row_bytes_;
    if (end > file.bytes()) {
      fail(ErrorKind::kIo, "[load] ", file.path(), " has ", file.bytes(), " bytes, tensor \"",
           spec.name, "\" ends at ", end, "; the file is truncated or not the planned one");
    }
    extents_.push_back({&file, row, rows, extent.offset, stride});
    row += extent.rows;
  }
}

void StoredTensor::find_pieces(WeightFiles& files) {
  for (const SourcePiece& piece : spec_->source->aux) {
    const WeightFile& file = files.of(piece.file);
    if (piece.offset + piece.bytes() > file.bytes()) {
      fail(ErrorKind::kIo, "[load] ", file.path(), " has ", file.bytes(), " bytes, the ",
           piece.name, " of tensor \"", spec_->name, "\" ends at ", piece.offset + piece.bytes(),
           "; the file is truncated or not the planned one");
    }
    aux_.push_back(&file);
  }
}

void StoredTensor::open(const Format& format) {
  if (is_packed(stored_) && matrix_ == nullptr) {
    pages_.push_back(file().map());
    matrix_ =
        std::make_unique<PackedMatrix>(spec_->name, row_of(stored_).exact,
                                       pages_[0]->data() + offset(), spec_->rows(), spec_->cols());
  }
  if (is_pieces(stored_) && matrix_ == nullptr) open_aux();
  if (matrix_ != nullptr) matrix_->comes_from(std::string(file_of(0)));
  if (matrix_ == nullptr || !is_packed(format)) return;
  if (!can_encode(matrix_->exact(), format)) refuse_format(spec_->name, matrix_->exact(), format);
}

void StoredTensor::open_aux() {
  weights_.name = spec_->name;
  weights_.stored = stored_name(stored_);
  weights_.rows = spec_->rows();
  weights_.cols = spec_->cols();
  for (size_t i = 0; i < aux_.size(); ++i) {
    const SourcePiece& piece = spec_->source->aux[i];
    pages_.push_back(aux_[i]->map());
    const std::span<const std::byte> bytes(pages_.back()->data() + piece.offset,
                                           static_cast<size_t>(piece.bytes()));
    weights_.pieces[piece.name] = {piece.dtype, piece.shape, bytes};
  }
  matrix_ = open_pieces(weights_);
}

void StoredTensor::check_bound() const {
  if (view_->shape != spec_->shape) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", spec_->name, "\" has shape ",
         shape_text(view_->shape), ", the plan says ", shape_text(spec_->shape));
  }
  if (view_->data == nullptr || static_cast<int>(view_->dtype) >= kDTypes) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", spec_->name, "\" was bound ",
         view_->data == nullptr ? "without data" : "in a dtype of the KV cache",
         "; expected f32, f16 or bf16 in memory");
  }
}

const std::byte* StoredTensor::memory(int64_t row) const {
  if (view_ == nullptr) return nullptr;
  return static_cast<const std::byte*>(view_->data) + row * row_bytes_;
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
    std::memcpy(to, memory(row), static_cast<size_t>(count * row_bytes_));
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
