// Matrices that files hold in one of HELM's own packed formats. Knows memory, no files and no
// plans.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "weights/stored_matrix.h"

namespace helm {

// matrix: its first byte, aligned to 64; the memory must outlive the object.
class PackedMatrix final : public StoredMatrix {
 public:
  PackedMatrix(std::string name, const Format& format, const std::byte* matrix, int64_t rows,
               int64_t cols, int64_t first_row = 0)
      : StoredMatrix(std::move(name), rows, cols, format, first_row), matrix_(matrix) {}

  // Throws as read_row does where a scale is NaN or infinite. Reads what stands in front of the
  // codes alone: some percent of the matrix.
  void check_scales() const;
  void unpack(int64_t row, int count, int64_t col, int64_t n, SpanRow* to) const override;

 private:
  const std::byte* matrix_;
};

}  // namespace helm
