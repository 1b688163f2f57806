#include "engine/weights.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "cpu/compression.h"
#include "cpu/stage.h"
#include "cpu/weight_format.h"
#include "engine/first_touch.h"
#include "engine/stages.h"
#include "engine/weight_files.h"

namespace helm {
namespace {

// Large enough to amortise a system call, small enough that the last pieces spread over threads.
constexpr int64_t kPieceElements = int64_t{1} << 21;
// What is converted or compressed on its way comes in parts that stay in cache, so that a thread
// has less than 1 MiB of buffers.
constexpr int64_t kPartElements = int64_t{1} << 16;
// Page-locked buffers of all threads together, but for at least kLeastUploadBytes each.
constexpr int64_t kUploadBytes = int64_t{64} << 20;
constexpr int64_t kLeastUploadBytes = int64_t{1} << 20;

// One piece of one tensor on its way to its place.
struct Piece {
  const WeightFile* file = nullptr;  // or null: from memory
  const std::byte* memory = nullptr;
  int64_t offset = 0;  // in the file, bytes
  DType from = DType::kF32;
  DType to = DType::kF32;
  std::byte* place = nullptr;                    // in host memory
  DeviceAddress address = DeviceAddress::kNull;  // or on the accelerator
  int64_t elements = 0;
  int owner = kAnyone;  // the member that should move it
  // Or whole rows on their way into a compressed matrix.
  cpu::Compression* compression = nullptr;
  int64_t first_row = 0;
  const TensorSpec* tensor = nullptr;

  int64_t placed_bytes() const { return elements * dtype_bytes(to); }
  // Elements [begin, begin + count) of it, without their place.
  Piece part(int64_t begin, int64_t count) const {
    Piece part = *this;
    if (memory != nullptr) part.memory += begin * dtype_bytes(from);
    part.offset += begin * dtype_bytes(from);
    part.elements = count;
    return part;
  }
};

// Calls body(begin, count) for parts of at most `most` of n elements.
template <typename Body>
void in_parts(int64_t n, int64_t most, const Body& body) {
  for (int64_t begin = 0; begin < n; begin += most) body(begin, std::min(most, n - begin));
}

void convert(const cpu::KernelTable& kernels, const void* from, DType from_dtype, void* to,
             DType to_dtype, int64_t n) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(n * dtype_bytes(from_dtype)));
  } else if (to_dtype == DType::kF32) {
    kernels.widen[static_cast<int>(from_dtype)](from, static_cast<float*>(to), n);
  } else if (from_dtype == DType::kF32) {
    kernels.narrow[static_cast<int>(to_dtype)](static_cast<const float*>(from), to, n);
  } else {
    std::vector<float> wide(static_cast<size_t>(std::min(n, kPartElements)));
    in_parts(n, kPartElements, [&](int64_t begin, int64_t count) {
      const auto* source = static_cast<const std::byte*>(from) + begin * dtype_bytes(from_dtype);
      auto* place = static_cast<std::byte*>(to) + begin * dtype_bytes(to_dtype);
      kernels.widen[static_cast<int>(from_dtype)](source, wide.data(), count);
      kernels.narrow[static_cast<int>(to_dtype)](wide.data(), place, count);
    });
  }
}

// Reads and converts a piece to `place`.
void move_piece(const Piece& piece, const cpu::KernelTable& kernels, std::byte* place) {
  if (piece.file == nullptr) {
    convert(kernels, piece.memory, piece.from, place, piece.to, piece.elements);
  } else if (piece.from == piece.to) {
    piece.file->read(place, piece.placed_bytes(), piece.offset);
  } else {
    const int64_t size = dtype_bytes(piece.from);
    std::vector<std::byte> staging(
        static_cast<size_t>(std::min(piece.elements, kPartElements) * size));
    in_parts(piece.elements, kPartElements, [&](int64_t begin, int64_t count) {
      piece.file->read(staging.data(), count * size, piece.offset + begin * size);
      convert(kernels, staging.data(), piece.from, place + begin * dtype_bytes(piece.to), piece.to,
              count);
    });
  }
}

// Reads a piece, converts it to bf16 and compresses it.
void compress_piece(const Piece& piece, const cpu::KernelTable& kernels) {
  const int64_t cols = piece.tensor->shape[1];
  const int64_t most = std::max<int64_t>(1, kPartElements / cols) * cols;
  std::vector<uint16_t> plain(static_cast<size_t>(std::min(piece.elements, most)));
  in_parts(piece.elements, most, [&](int64_t begin, int64_t count) {
    move_piece(piece.part(begin, count), kernels, reinterpret_cast<std::byte*>(plain.data()));
    for (int64_t r = 0; r < count / cols; ++r) {
      const int64_t row = piece.first_row + begin / cols + r;
      if (piece.compression->put(kernels, row, plain.data() + r * cols)) continue;
      fail(ErrorKind::kCompression, "[load] the weights of tensor \"", piece.tensor->name,
           "\" do not compress: more than one in ", cpu::kWeightsPerEscape,
           " lies outside of the 16 binades that most of its row take; load with copied weights "
           "instead");
    }
  });
}

// Sends pieces to the accelerator. Every worker fills one of its two page-locked buffers while the
// other is on its way.
class Uploader {
 public:
  Uploader(Device& device, int workers, int64_t buffer_bytes) : stream_(device.create_stream()) {
    for (int i = 0; i < 2 * workers; ++i) {
      buffers_.push_back({StagingMemory(device, buffer_bytes, "buffers for uploading weights"),
                          device.create_event()});
    }
    turn_.resize(static_cast<size_t>(workers), 0);
  }
  ~Uploader() { drain(); }

  void send(const Piece& piece, const cpu::KernelTable& kernels, int worker) {
    const auto w = static_cast<size_t>(worker);
    Buffer& buffer = buffers_[2 * w + turn_[w]];
    turn_[w] ^= 1;
    buffer.sent->synchronize();
    move_piece(piece, kernels, buffer.memory.data());
    const std::lock_guard<std::mutex> lock(mutex_);
    stream_->upload(piece.address, buffer.memory.data(), piece.placed_bytes());
    stream_->record(*buffer.sent);
  }
  void finish() { stream_->synchronize(); }

 private:
  struct Buffer {
    StagingMemory memory;
    std::unique_ptr<Event> sent;
  };

  void drain() noexcept {
    try {
      stream_->synchronize();
    } catch (...) {  // already reported by whoever is throwing
    }
  }

  std::vector<Buffer> buffers_;  // [workers, 2]
  std::vector<size_t> turn_;     // [workers]
  std::unique_ptr<Stream> stream_;
  std::mutex mutex_;  // of the stream
};

// Moves all pieces with all members, each its own; member 0 reports progress between its pieces.
// The first failure, or a throwing progress callback, stops everyone and is rethrown.
void move_all(const std::vector<Piece>& pieces, const cpu::KernelTable& kernels,
              ThreadPool& threads, Uploader* uploader,
              const std::function<void(int64_t, int64_t)>& progress) {
  int64_t total = 0;
  std::vector<int> owners;
  for (const Piece& piece : pieces) {
    total += piece.placed_bytes();
    owners.push_back(piece.owner);
  }
  std::atomic<int64_t> done{0};
  run_owned(threads, owners, nodes_of(threads), [&](size_t i, Team& team) {
    const Piece& piece = pieces[i];
    if (piece.compression != nullptr) {
      compress_piece(piece, kernels);
    } else if (piece.place != nullptr) {
      move_piece(piece, kernels, piece.place);
    } else {
      uploader->send(piece, kernels, team.worker());
    }
    done += piece.placed_bytes();
    if (team.worker() == 0 && progress) {
      team.as_caller([&] { progress(done.load(), total); });
    }
  });
  if (uploader != nullptr) uploader->finish();
  if (progress) progress(total, total);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Whether a tensor in a file can be read there: nothing to convert, elements aligned.
bool usable_in_place(WeightLoading loading, const TensorSpec& spec) {
  return loading == WeightLoading::kMapped && spec.source->dtype == spec.dtype &&
         spec.source->offset % dtype_bytes(spec.dtype) == 0;
}

const TensorView* bound(const EngineOptions& options, const TensorSpec& spec) {
  const auto it = options.tensors.find(spec.name);
  if (it == options.tensors.end()) {
    if (spec.source) return nullptr;
    fail(ErrorKind::kInvalid, "[load] tensor \"", spec.name,
         "\" has no source file in the plan and was not bound from memory; add it to ",
         "EngineOptions::tensors");
  }
  if (it->second.shape != spec.shape) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", spec.name, "\" has shape ",
         shape_text(it->second.shape), ", the plan says ", shape_text(spec.shape));
  }
  if (it->second.data == nullptr || static_cast<int>(it->second.dtype) >= kDTypes) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", spec.name, "\" was bound ",
         it->second.data == nullptr ? "without data" : "in a dtype of the KV cache",
         "; expected f32, f16 or bf16 in memory");
  }
  return &it->second;
}

// The file of a tensor, checked to hold it.
const WeightFile& file_of(WeightFiles& files, const TensorSpec& spec) {
  const WeightFile& file = files.of(spec.source->file);
  const int64_t end = spec.source->offset + spec.elements() * dtype_bytes(spec.source->dtype);
  if (end > file.bytes()) {
    fail(ErrorKind::kIo, "[load] ", file.path(), " has ", file.bytes(), " bytes, tensor \"",
         spec.name, "\" ends at ", end, "; the file is truncated or not the planned one");
  }
  return file;
}

// Cuts tensors in pieces of one owner and at most `largest` elements each; `set_place(piece,
// tensor, offset)` says where each goes. shares: by TensorIndex.
template <typename SetPlace>
void cut(const Plan& plan, const EngineOptions& options, WeightFiles& files, const Placed& placed,
         const std::vector<std::vector<TensorShare>>& shares, int64_t largest,
         const SetPlace& set_place, std::vector<Piece>& pieces) {
  const auto cut_share = [&](TensorIndex index, int64_t place, const TensorShare& share) {
    const TensorSpec& spec = plan.tensors[static_cast<size_t>(index)];
    const TensorView* view = bound(options, spec);
    const int64_t cols = spec.shape.back();
    const int64_t most =
        cpu::is_compressed(plan, spec) ? largest / cols * cols : largest;  // or rows
    for (int64_t begin = share.begin; begin < share.end; begin += most) {
      Piece piece;
      piece.tensor = &spec;
      piece.first_row = begin / cols;
      piece.from = view != nullptr ? view->dtype : spec.source->dtype;
      piece.to = spec.dtype;
      piece.elements = std::min(most, share.end - begin);
      piece.owner = share.member;
      if (view != nullptr) {
        piece.memory = static_cast<const std::byte*>(view->data) + begin * dtype_bytes(piece.from);
      } else {
        piece.file = &file_of(files, spec);
        piece.offset = spec.source->offset + begin * dtype_bytes(piece.from);
      }
      set_place(piece, index, place + begin * dtype_bytes(spec.dtype));
      pieces.push_back(piece);
    }
  };
  for (const auto& [index, place] : placed) {
    for (const TensorShare& share : shares[static_cast<size_t>(index)]) {
      cut_share(index, place, share);
    }
  }
}

}  // namespace

Placed placed_in_order(const Plan& plan, const std::vector<TensorIndex>& tensors) {
  Placed placed;
  int64_t end = 0;
  for (const TensorIndex index : tensors) {
    const int64_t begin = align_up(end, kDeviceAlignment);
    placed.emplace_back(index, begin);
    end = begin + plan.tensors[static_cast<size_t>(index)].bytes();
  }
  return placed;
}

Weights::Weights(const Plan& plan, const EngineOptions& options, const cpu::KernelTable& kernels,
                 ThreadPool& threads, Account* accelerator)
    : on_cpu_(plan.tensors.size(), DeviceAddress::kNull),
      on_accelerator_(plan.tensors.size(), DeviceAddress::kNull) {
  WeightFiles files(options.directory);
  std::map<const WeightFile*, std::shared_ptr<MappedFile>> mappings;
  Placed placed;
  int64_t arena_bytes = 0;
  std::vector<bool> resident = resident_units(plan);
  const Placed own = placed_in_order(plan, tensors_of(plan, resident));
  const auto anyone_s = decode_shares(plan, std::vector<bool>(resident.size(), false), 1);
  resident.flip();
  const auto by_reader = decode_shares(plan, resident, threads.size());
  for (const TensorIndex index : tensors_of(plan, resident)) {
    const TensorSpec& spec = plan.tensors[static_cast<size_t>(index)];
    DeviceAddress& address = on_cpu_[static_cast<size_t>(index)];
    const int64_t bytes = cpu::host_bytes(plan, spec);
    cpu_bytes_ += bytes;
    const TensorView* view = bound(options, spec);
    if (view != nullptr && view->dtype == spec.dtype && !cpu::is_compressed(plan, spec)) {
      address = cpu::device_address(view->data);
      owners_.push_back(view->owner);
      continue;
    }
    if (view == nullptr && usable_in_place(plan.loading, spec)) {
      const WeightFile& file = file_of(files, spec);
      std::shared_ptr<MappedFile>& mapping = mappings[&file];
      if (mapping == nullptr) mapped_.push_back(mapping = file.map());
      address = cpu::device_address(mapping->data() + spec.source->offset);
      continue;
    }
    placed.emplace_back(index, arena_bytes);
    arena_bytes = align_up(arena_bytes + bytes, kCacheLine);
  }
  std::vector<Piece> pieces;
  std::unique_ptr<Uploader> uploader;
  const int64_t upload_bytes = std::clamp(kUploadBytes / (2 * threads.size()), kLeastUploadBytes,
                                          kPieceElements * int64_t{sizeof(float)});
  if (!own.empty()) {
    const auto& [last, offset_of_last] = own.back();
    const int64_t bytes = offset_of_last + plan.tensors[static_cast<size_t>(last)].bytes();
    accelerator_memory_ = DeviceMemory(*accelerator, bytes, "the model's weights");
    for (const auto& [index, offset] : own) {
      on_accelerator_[static_cast<size_t>(index)] = accelerator_memory_.address() + offset;
    }
    uploader = std::make_unique<Uploader>(accelerator->device(), threads.size(), upload_bytes);
  }
  cut(
      plan, options, files, own, anyone_s, upload_bytes / int64_t{sizeof(float)},
      [&](Piece& piece, TensorIndex, int64_t offset) {
        piece.address = accelerator_memory_.address() + offset;
      },
      pieces);
  arena_ = Arena(arena_bytes, "the model's weights");
  std::map<TensorIndex, cpu::Compression> compressions;
  for (const auto& [index, offset] : placed) {
    std::byte* place = arena_.data() + offset;
    on_cpu_[static_cast<size_t>(index)] = cpu::device_address(place);
    const TensorSpec& spec = plan.tensors[static_cast<size_t>(index)];
    if (!cpu::is_compressed(plan, spec)) continue;
    compressions.try_emplace(index, place, spec.shape[0], spec.shape[1]);
  }
  cut(
      plan, options, files, placed, by_reader, kPieceElements,
      [&](Piece& piece, TensorIndex index, int64_t offset) {
        const auto compression = compressions.find(index);
        if (compression == compressions.end()) {
          piece.place = arena_.data() + offset;
        } else {
          piece.compression = &compression->second;
        }
      },
      pieces);
  move_all(pieces, kernels, threads, uploader.get(), options.progress);
  files.check();
  huge_page_bytes_ = arena_.huge_page_bytes();
}

void Weights::check_files(bool used) const {
  for (const auto& file : mapped_) file->check(used);
}

}  // namespace helm
