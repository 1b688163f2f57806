#include "weights/digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "cpu/compression.h"
#include "cpu/stage.h"
#include "helm/tiles.h"
#include "weights/span_row.h"

namespace helm {
namespace {

constexpr int64_t kPlaces = 4;  // of each tensor, evenly spaced
constexpr int64_t kPlaceBytes = 32;

// FNV-1a.
uint64_t hash(uint64_t state, const std::byte* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    state = (state ^ static_cast<uint64_t>(data[i])) * 1099511628211U;
  }
  return state;
}

// Bytes of a matrix of bf16c as they are in bf16. Those asked for may begin within a weight and go
// on in the next rows.
void read_plain(const cpu::KernelTable& kernels, const TensorSpec& tensor, const std::byte* data,
                int64_t offset, int64_t bytes, std::byte* out) {
  const int64_t cols = tensor.cols();
  const auto matrix = cpu::CompressedMatrix::at(data, tensor.rows(), cols);
  for (int64_t i = 0; i < bytes; ++i) {
    const int64_t element = (offset + i) / int64_t{sizeof(uint16_t)};
    uint16_t weight = 0;
    cpu::read_compressed(kernels, matrix, element / cols, element % cols, 1, &weight);
    std::memcpy(out + i, reinterpret_cast<const std::byte*>(&weight) + (offset + i) % 2, 1);
  }
}

// Bytes of tensors as devices hold them. Those that are cut are put together as one device would
// hold all of them: a plan's cuts do not show, unless parts are in different formats.
class HeldBytes {
 public:
  HeldBytes(const Plan& plan, const Weights& weights, const cpu::KernelTable& kernels,
            Device* accelerator)
      : plan_(plan),
        weights_(weights),
        kernels_(kernels),
        device_(accelerator),
        stream_(accelerator ? accelerator->create_stream() : nullptr) {}

  // Whether any device has it.
  bool held(TensorIndex tensor) const {
    return on_cpu(tensor) || (device_ != nullptr && of_device(tensor).address != kNowhere);
  }
  // bf16c as bf16, as the order of its bytes is the isa's.
  Format format(TensorIndex tensor) const {
    const Format format = on_cpu(tensor) ? of_cpu(tensor).format : of_device(tensor).format;
    return format.codes == Codes::kBF16C ? format_of(DType::kBF16) : format;
  }

  void read(TensorIndex tensor, int64_t offset, int64_t bytes, std::byte* out) const {
    if (!on_cpu(tensor)) {
      stream_->download(out, of_device(tensor).address + offset, bytes);
      stream_->synchronize();
    } else if (const SliceSpec* slice = plan_.slice(tensor, kCpu);
               slice->access == SliceSpec::Access::kDisk) {
      weights_.disk()->read_some(tensor, offset, bytes, out);
    } else if (const Weight& here = of_cpu(tensor); here.format.codes == Codes::kBF16C) {
      read_plain(kernels_, spec(tensor), cpu::host_pointer(here.address), offset, bytes, out);
    } else {
      std::memcpy(out, cpu::host_pointer(here.address) + offset, static_cast<size_t>(bytes));
    }
  }

  // Likewise of the tensor that these are parts of, in their format.
  void read_whole(std::span<const TensorIndex> parts, int64_t offset, int64_t bytes,
                  std::byte* out) const {
    const Format format = this->format(parts[0]);
    while (bytes > 0) {
      const int64_t some = is_packed(format) ? read_packed(parts, format, offset, bytes, out)
                                             : read_dense(parts, format, offset, bytes, out);
      offset += some, bytes -= some, out += some;
    }
  }

 private:
  static constexpr DeviceAddress kNowhere = DeviceAddress::kNull;

  const Weight& of_cpu(TensorIndex t) const { return weights_.on(kCpu)[static_cast<size_t>(t)]; }
  const Weight& of_device(TensorIndex t) const {
    return weights_.on(Plan::kFirstAccelerator)[static_cast<size_t>(t)];
  }
  bool on_cpu(TensorIndex t) const { return of_cpu(t).address != kNowhere; }
  const TensorSpec& spec(TensorIndex t) const { return plan_.tensors[static_cast<size_t>(t)]; }
  int64_t whole_cols(TensorIndex t) const {
    return spec(t).is_matrix() ? spec(t).part->shape[1] : 1;
  }

  // The bytes of one part's row from `offset` on, at most so many; returns how many.
  int64_t read_dense(std::span<const TensorIndex> parts, const Format& format, int64_t offset,
                     int64_t bytes, std::byte* out) const {
    const int64_t size = dtype_bytes(dtype_of(format)), row_bytes = whole_cols(parts[0]) * size;
    const int64_t row = offset / row_bytes, at = offset % row_bytes;
    for (const TensorIndex t : parts) {
      const TensorPart& part = *spec(t).part;
      const int64_t r = row - part.row, own_bytes = spec(t).cols() * size, begin = part.col * size;
      if (r < 0 || r >= spec(t).rows() || at < begin || at >= begin + own_bytes) continue;
      const int64_t some = std::min(bytes, begin + own_bytes - at);
      read(t, r * own_bytes + at - begin, some, out);
      return some;
    }
    return bytes;  // none: parts cover the whole
  }

  // The bytes of one span, or of what a strip has in front of them, likewise.
  int64_t read_packed(std::span<const TensorIndex> parts, const Format& format, int64_t offset,
                      int64_t bytes, std::byte* out) const {
    const int64_t cols = whole_cols(parts[0]), strip = offset / strip_bytes(format, cols);
    const int64_t at = offset - strip_at(format, cols, strip);
    const int64_t header = strip_header_bytes(format);
    const int64_t col = at < header ? 0 : (at - header) / span_bytes(format, kSpanCols) * kSpanCols;
    const int64_t n = span_cols(format, cols, col);
    const int64_t begin = at < header ? 0 : span_at(format, col);
    const int64_t end = at < header ? header : begin + span_bytes(format, n);
    SpanRow rows[kStripRows];
    std::memset(static_cast<void*>(rows), 0, sizeof rows);
    for (const TensorIndex t : parts) {
      for (int r = 0; r < kStripRows; ++r) take(t, format, strip * kStripRows + r, col, n, rows[r]);
    }
    std::vector<std::byte> made(static_cast<size_t>(end - begin + kFormatLine));
    void* place = made.data();
    size_t room = made.size();
    auto* aligned = static_cast<std::byte*>(
        std::align(kFormatLine, static_cast<size_t>(end - begin), place, room));
    if (at < header) {
      write_strip_header(format, rows, aligned);
    } else {
      write_span(format, n, rows, aligned);
    }
    const int64_t some = std::min(bytes, end - at);
    std::memcpy(out, aligned + at - begin, static_cast<size_t>(some));
    return some;
  }

  // What a part has of a row of the whole in the n columns from `col` on.
  void take(TensorIndex t, const Format& format, int64_t row, int64_t col, int64_t n,
            SpanRow& to) const {
    const TensorPart& part = *spec(t).part;
    const int64_t r = row - part.row, cols = spec(t).cols();
    if (r < 0 || r >= spec(t).rows()) return;
    const int64_t first = std::max(col, part.col) / kSpanCols * kSpanCols;
    for (int64_t own = std::max<int64_t>(0, first - part.col) / kSpanCols * kSpanCols;
         own < cols && part.col + own < col + n; own += kSpanCols) {
      const int64_t count = span_cols(format, cols, own);
      const int64_t strip = strip_at(format, cols, r / kStripRows),
                    head = strip_header_bytes(format);
      const int64_t size = span_bytes(format, count);
      std::vector<std::byte> bytes(static_cast<size_t>(head + size));
      if (head > 0) read(t, strip, head, bytes.data());
      read(t, strip + span_at(format, own), size, bytes.data() + head);
      SpanRow row_of;
      read_span(format, count, bytes.data(), bytes.data() + head, static_cast<int>(r % kStripRows),
                &row_of);
      merge(format, row_of, part.col + own - col, count, n, to);
    }
  }

  // Columns [0, count) of one span to another, whose column 0 they lie `shift` behind.
  static void merge(const Format& format, const SpanRow& from, int64_t shift, int64_t count,
                    int64_t n, SpanRow& to) {
    to.d = from.d, to.e = from.e, to.row_scale = from.row_scale;
    for (int64_t j = std::max<int64_t>(0, -shift); j < count && j + shift < n; ++j) {
      to.code[j + shift] = from.code[j];
      if (format.group == 0) continue;
      const int64_t g = j / format.group, into = (j + shift) / format.group;
      to.s[into] = from.s[g], to.m[into] = from.m[g];
      to.l[into] = from.l[g], to.n[into] = from.n[g];
    }
  }

  const Plan& plan_;
  const Weights& weights_;
  const cpu::KernelTable& kernels_;
  Device* device_;
  std::unique_ptr<Stream> stream_;
};

// What is looked at together: a tensor, or the parts of one, in the order of the plan.
std::vector<std::vector<TensorIndex>> held_tensors(const Plan& plan, const HeldBytes& held) {
  std::vector<std::vector<TensorIndex>> found;
  std::map<std::string, size_t> by_whole;
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const auto tensor = static_cast<TensorIndex>(t);
    const std::optional<TensorPart>& part = plan.tensors[t].part;
    if (!held.held(tensor)) continue;  // no op reads it
    if (part && part->whole != kNoTensor && held.held(part->whole)) continue;
    const auto [place, fresh] =
        by_whole.emplace(part ? part->tensor : plan.tensors[t].name, found.size());
    if (fresh) found.emplace_back();
    found[place->second].push_back(tensor);
  }
  return found;
}

}  // namespace

std::string weights_digest(const Plan& plan, const Weights& weights,
                           const cpu::KernelTable& kernels, Device* accelerator) {
  const HeldBytes held(plan, weights, kernels, accelerator);
  uint64_t state = 14695981039346656037U;
  std::array<std::byte, kPlaceBytes> place{};
  const auto add = [&](std::span<const TensorIndex> parts, bool whole) {
    const TensorSpec& tensor = plan.tensors[static_cast<size_t>(parts[0])];
    const std::vector<int64_t>& shape = whole ? tensor.part->shape : tensor.shape;
    const Format format = held.format(parts[0]);
    const int64_t all = format_bytes(format, shape[0], shape.size() == 2 ? shape[1] : 1);
    const int64_t bytes = std::min(kPlaceBytes, all);
    for (int64_t i = 0; i < kPlaces; ++i) {
      const int64_t offset = (all - bytes) * i / (kPlaces - 1);
      if (whole) {
        held.read_whole(parts, offset, bytes, place.data());
      } else {
        held.read(parts[0], offset, bytes, place.data());
      }
      state = hash(state, place.data(), bytes);
    }
  };
  for (const std::vector<TensorIndex>& parts : held_tensors(plan, held)) {
    const auto same = [&](TensorIndex t) { return held.format(t) == held.format(parts[0]); };
    const bool cut = plan.tensors[static_cast<size_t>(parts[0])].part.has_value();
    if (cut && std::ranges::all_of(parts, same)) {
      add(parts, true);
    } else {
      for (const TensorIndex& one : parts) add({&one, 1}, false);
    }
  }
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << state;
  return text.str();
}

}  // namespace helm
