// Parts of a checkpoint's tensors: together they are each tensor, once.
#include <algorithm>
#include <map>
#include <set>

#include "plan/reader.h"

namespace helm {
namespace {

struct Rectangle {
  int64_t row, end_row, col, end_col;

  explicit Rectangle(const TensorSpec& spec)
      : row(spec.part->row),
        end_row(row + spec.rows()),
        col(spec.part->col),
        end_col(col + spec.cols()) {}
  bool holds(int64_t r, int64_t c) const {
    return row <= r && r < end_row && col <= c && c < end_col;
  }
};

}  // namespace

void PlanReader::check_parts(const JsonReader& tensors) {
  constexpr size_t kMost = 64;                       // of one tensor
  std::map<std::string, std::vector<size_t>> parts;  // by the whole's name
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    const TensorSpec& spec = plan_.tensors[i];
    if (spec.part) parts[spec.part->tensor].push_back(i);
  }
  for (const auto& [name, indices] : parts) {
    const JsonReader node = tensors[indices.front()]["part"];
    const TensorSpec& first = plan_.tensors[indices.front()];
    if (indices.size() > kMost) node.reject("expected at most ", kMost, " parts of \"", name, "\"");
    const auto whole = tensor_index_.find(name);
    if (whole != tensor_index_.end()) {
      const TensorSpec& spec = plan_.tensors[static_cast<size_t>(whole->second)];
      if (spec.part || spec.shape != first.part->shape || spec.source != first.source) {
        node.reject("\"", name, "\" is listed with another shape or source");
      }
      for (const size_t i : indices) plan_.tensors[i].part->whole = whole->second;
    }
    std::set<int64_t> rows{0}, cols{0};  // where parts begin
    std::vector<Rectangle> rectangles;
    for (const size_t i : indices) {
      const TensorSpec& spec = plan_.tensors[i];
      if (spec.part->shape != first.part->shape || spec.source != first.source) {
        tensors[i]["part"].reject("another part of \"", name, "\" has another shape or source");
      }
      const Rectangle& r = rectangles.emplace_back(spec);
      rows.insert({r.row, r.end_row});
      cols.insert({r.col, r.end_col});
    }
    const bool matrix = first.is_matrix();
    const int64_t end_row = first.part->shape[0], end_col = matrix ? first.part->shape[1] : 1;
    rows.insert(end_row);
    cols.insert(end_col);
    for (auto r = rows.begin(); *r < end_row; ++r) {
      for (auto c = cols.begin(); *c < end_col; ++c) {
        const auto holding = std::ranges::count_if(
            rectangles, [&](const Rectangle& one) { return one.holds(*r, *c); });
        if (holding == 1) continue;
        const char* found = holding == 0 ? " lie in no part" : " lie in two parts";
        std::string columns;
        if (matrix) {
          columns =
              ", columns " + std::to_string(*c) + " to " + std::to_string(*std::next(c)) + ",";
        }
        node.reject("rows ", *r, " to ", *std::next(r), columns, " of \"", name, "\"", found);
      }
    }
  }
}

}  // namespace helm
