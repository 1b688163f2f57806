#include "weights/sinks.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "weights/packed.h"

namespace helm {
namespace {

// Calls body(first, count) for parts of a read that stay in cache.
template <typename Body>
void in_parts(const Read& read, int64_t row_unit, const Body& body) {
  const int64_t units = std::max<int64_t>(1, kPartElements / read.from->spec().cols() / row_unit);
  const int64_t most = units * row_unit;
  for (int64_t row = 0; row < read.rows; row += most) {
    body(read.row + row, std::min(most, read.rows - row));
  }
}

// The bytes of a read's rows in a slice of this format.
int64_t bytes_of(const Read& read, const Format& format) {
  return format_bytes(format, read.rows, read.from->spec().cols());
}

// What no encoder has looked at, in cache still: scales that were copied, and vectors, which are
// few. Those in memory are their owner's.
void check_written(const Read& read, const Format& format, const std::byte* to) {
  const StoredTensor& from = *read.from;
  if (from.view() != nullptr) return;
  if (!from.spec().is_matrix()) {
    const auto* elements = reinterpret_cast<const float*>(to);  // vectors are f32
    return from.check_finite(read.row, {elements, static_cast<size_t>(read.rows)});
  }
  if (!is_packed(format) || !from.same_bytes(format)) return;
  PackedMatrix rows(from.spec().name, format, to, read.rows, from.spec().cols(), read.row);
  rows.comes_from(std::string(from.file_of(read.row)));
  rows.check_scales();
}

// Reads rows and encodes them to where the first lies in a slice.
void write_rows(const Read& read, const Format& format, const cpu::KernelTable& kernels,
                std::byte* to) {
  const StoredTensor& from = *read.from;
  const TensorSpec& spec = from.spec();
  if (from.same_bytes(format)) {
    from.read(read.row, read.rows, to);
  } else if (const StoredMatrix* matrix = from.matrix()) {
    encode(*matrix, format, kernels, read.row, read.rows, to);
  } else if (const std::byte* memory = from.memory(read.row)) {
    encode_rows({spec, from.stored(), memory, read.row, read.rows, {}}, format, kernels, to);
  } else {
    std::vector<std::byte> staging;
    in_parts(read, row_unit(format), [&](int64_t row, int64_t count) {
      staging.resize(static_cast<size_t>(count * from.row_bytes()));
      from.read(row, count, staging.data());
      encode_rows({spec, from.stored(), staging.data(), row, count, from.file_of(row)}, format,
                  kernels, to + format_bytes(format, row - read.row, spec.cols()));
    });
  }
  check_written(read, format, to);
}

}  // namespace

void ArenaSink::take(const Read& read, int) {
  write_rows(read, format(), kernels_,
             to_ + format_bytes(format(), read.row, read.from->spec().cols()));
}

void EncodeSink::take(const Read& read, int) {
  const TensorSpec& spec = read.from->spec();
  std::vector<uint16_t> plain;
  in_parts(read, 1, [&](int64_t row, int64_t count) {
    plain.resize(static_cast<size_t>(count * spec.cols()));
    write_rows({read.from, this, row, count, read.owner}, format_of(DType::kBF16), kernels_,
               reinterpret_cast<std::byte*>(plain.data()));
    for (int64_t r = 0; r < count; ++r) {
      if (compression_.put(kernels_, row + r, plain.data() + r * spec.cols())) continue;
      fail(ErrorKind::kCompression, "[load] the weights of tensor \"", spec.name,
           "\" do not compress: more than one in ", cpu::kWeightsPerEscape,
           " lies outside of the 16 binades that most of its row take; load with copied weights "
           "instead");
    }
  });
}

Uploader::Uploader(Device& device, Account& host, int workers, int64_t buffer_bytes)
    : stream_(device.create_stream()) {
  for (int i = 0; i < 2 * workers; ++i) {
    buffers_.push_back({StagingMemory(host, device, buffer_bytes, "buffers for uploading weights"),
                        device.create_event()});
  }
  turn_.resize(static_cast<size_t>(workers), 0);
}

Uploader::~Uploader() {
  try {
    stream_->synchronize();
  } catch (...) {  // already reported by whoever is throwing
  }
}

Uploader::Buffer& Uploader::next_buffer(int worker) {
  const auto w = static_cast<size_t>(worker);
  Buffer& buffer = buffers_[2 * w + turn_[w]];
  turn_[w] ^= 1;
  buffer.sent->synchronize();
  return buffer;
}

void Uploader::send(DeviceAddress to, int64_t bytes, Buffer& buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stream_->upload(to, buffer.memory.data(), bytes);
  stream_->record(*buffer.sent);
}

void UploadSink::take(const Read& read, int worker) {
  const int64_t offset = format_bytes(format(), read.row, read.from->spec().cols());
  uploader_->send(to_ + offset, bytes_of(read, format()), worker,
                  [&](std::byte* memory) { write_rows(read, format(), kernels_, memory); });
}

}  // namespace helm
