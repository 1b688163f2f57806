// Products bound as launches: kernels of ours for few rows, cuBLAS for many.
#include <algorithm>

#include "cuda/kernels/packed.h"
#include "cuda/ops.h"

namespace helm::cuda {
namespace {

static_assert(quantized_bytes(1, kBlockCols) == sizeof(QuantBlock));

// Few rows: one product per run of parts that reads the weights once, in f32 or, of packed weights,
// in integers. Many rows: cuBLAS, with the input narrowed to the weights' dtype, here or by the op
// before; packed weights become such a matrix panel by panel.
class BoundLinear : public BoundOp {
 public:
  BoundLinear(const LinearOp& op, const Bindings& b, DType narrowed)
      : per_output_(b.per_output(op.in)),
        in_(b.value(op.in)),
        cols_(b.width(op.in)),
        out_(b.value(op.out)),
        out_width_(b.width(op.out)),
        accumulate_(op.accumulate),
        narrow_(b.narrow),
        narrowed_(narrowed),
        panel_(b.panel) {
    int64_t column = 0;
    for (const LinearOp::Part& part : op.parts) {
      const int64_t rows = b.tensor(part.weight).rows();
      add_part({b.weight(part.weight), b.format(part.weight), b.vector(part.bias), column, rows});
      column += rows;
    }
  }
  const char* name() const override { return "linear"; }
  void launch(const StepContext& context) const override {
    const int64_t rows = context.rows(per_output_);
    if (rows == 0) return;
    if (rows <= kMatvecTokens) {
      launch_few(rows, context.queue);
    } else {
      launch_many(rows, context);
    }
  }

 private:
  struct Part {
    const void* weight;  // [rows, cols]
    Format format;
    const float* bias;  // [rows] or null
    int64_t column;     // of the stacked output
    int64_t rows;
  };

  // Parts whose weights and biases lie one after the other are one product.
  void add_part(const Part& part) {
    if (!parts_.empty()) {
      Part& last = parts_.back();
      const auto* end =
          static_cast<const std::byte*>(last.weight) + read_bytes(last.format, last.rows, cols_);
      const bool biases = part.bias == (last.bias == nullptr ? nullptr : last.bias + last.rows);
      const bool whole = last.rows % row_unit(last.format) == 0;
      if (part.weight == end && part.format == last.format && biases && whole) {
        last.rows += part.rows;
        return;
      }
    }
    parts_.push_back(part);
  }

  void launch_few(int64_t tokens, const Queue& queue) const {
    auto* const quantized = static_cast<QuantBlock*>(narrow_);
    const auto packed = [](const Part& part) { return is_packed(part.format); };
    if (std::ranges::any_of(parts_, packed)) {
      quantize({in_, cols_, tokens, cols_, quantized}, queue);
    }
    for (const Part& part : parts_) {
      float* const c = out_ + part.column;
      if (packed(part)) {
        packed_matvec({quantized,
                       tokens,
                       {part.weight, part.format, part.rows, cols_},
                       part.bias,
                       accumulate_,
                       c,
                       out_width_},
                      queue);
      } else {
        matvec({in_, cols_, tokens, part.weight, dtype_of(part.format), part.rows, cols_, part.bias,
                accumulate_, c, out_width_},
               queue);
      }
    }
  }

  void launch_many(int64_t tokens, const StepContext& context) const {
    DType narrowed = narrowed_;
    for (const Part& part : parts_) {
      const DType dtype = is_packed(part.format) ? panel_.dtype : dtype_of(part.format);
      const void* a = in_;
      if (dtype != DType::kF32) {
        if (dtype != narrowed) {
          narrow(in_, cols_, tokens, cols_, dtype, narrow_, context.queue);
          narrowed = dtype;
        }
        a = narrow_;
      }
      float* const c = out_ + part.column;
      const auto multiply = [&](const void* w, int64_t first_row, int64_t rows) {
        context.blas.multiply(
            {a, cols_, w, dtype, tokens, rows, cols_, accumulate_, c + first_row, out_width_});
      };
      if (is_packed(part.format)) {
        const PackedMatrix w(part.weight, part.format, part.rows, cols_);
        const int64_t most = panel_.rows(cols_);
        for (int64_t row = 0; row < part.rows; row += most) {
          const int64_t rows = std::min(most, part.rows - row);
          expand({w, row, rows, panel_.memory, dtype}, context.queue);
          multiply(panel_.memory, row, rows);
        }
      } else {
        multiply(part.weight, 0, part.rows);
      }
      if (part.bias != nullptr) {
        add(part.bias, 0, tokens, part.rows, c, out_width_, context.queue);
      }
    }
  }

  bool per_output_;
  const float* in_;  // [rows, cols]
  int64_t cols_;
  float* out_;  // [rows, out_width]
  int64_t out_width_;
  bool accumulate_;
  void* narrow_;    // the input narrowed, or in eight bits
  DType narrowed_;  // what that holds of the input before; f32: nothing
  Panel panel_;
  std::vector<Part> parts_;
};

}  // namespace

std::unique_ptr<BoundOp> bind_linear(const LinearOp& op, DType narrowed, const Bindings& bindings) {
  return std::make_unique<BoundLinear>(op, bindings, narrowed);
}

}  // namespace helm::cuda
