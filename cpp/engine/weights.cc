#include "engine/weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace helm {
namespace {

// Large enough to amortise a system call, small enough that the last pieces spread over threads.
constexpr int64_t kPieceElements = int64_t{1} << 21;

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status{};
    if (fd_ < 0 || fstat(fd_, &status) != 0) {
      const int code = errno;
      if (fd_ >= 0) close(fd_);
      fail(ErrorKind::kIo, "[load] cannot read ", path, ": ", std::strerror(code));
    }
    bytes_ = status.st_size;
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(File&& other) noexcept
      : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}
  File& operator=(File&&) = delete;

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }

  // The whole file in memory, read-only, as long as the result lives.
  std::shared_ptr<void> map() const {
    const auto size = static_cast<size_t>(bytes_);
    void* base = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd_, 0);
    if (base == MAP_FAILED) {
      fail(ErrorKind::kIo, "[load] cannot map ", path_, ": ", std::strerror(errno),
           "; load with copied weights instead");
    }
    madvise(base, size, MADV_WILLNEED);  // starts reading what is not cached; only a hint
    return {base, [size](void* p) { munmap(p, size); }};
  }

  void read(void* to, int64_t bytes, int64_t offset) const {
    auto* out = static_cast<std::byte*>(to);
    while (bytes > 0) {
      const ssize_t got = pread(fd_, out, static_cast<size_t>(bytes), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        fail(ErrorKind::kIo, "[load] reading ", path_, " at offset ", offset,
             " failed: ", got == 0 ? "unexpected end of file" : std::strerror(errno));
      }
      out += got;
      offset += got;
      bytes -= got;
    }
  }

 private:
  std::string path_;
  int fd_;
  int64_t bytes_ = 0;
};

// One piece of one tensor on its way to its place.
struct Piece {
  const File* file = nullptr;  // or null: from memory
  const std::byte* memory = nullptr;
  int64_t offset = 0;  // in the file, bytes
  DType from = DType::kF32;
  DType to = DType::kF32;
  std::byte* place = nullptr;
  int64_t elements = 0;
};

void convert(const cpu::KernelTable& kernels, const void* from, DType from_dtype, void* to,
             DType to_dtype, int64_t n) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(n * dtype_bytes(from_dtype)));
  } else if (to_dtype == DType::kF32) {
    kernels.widen[static_cast<int>(from_dtype)](from, static_cast<float*>(to), n);
  } else if (from_dtype == DType::kF32) {
    kernels.narrow[static_cast<int>(to_dtype)](static_cast<const float*>(from), to, n);
  } else {
    std::vector<float> wide(static_cast<size_t>(n));
    kernels.widen[static_cast<int>(from_dtype)](from, wide.data(), n);
    kernels.narrow[static_cast<int>(to_dtype)](wide.data(), to, n);
  }
}

void move_piece(const Piece& piece, const cpu::KernelTable& kernels) {
  if (piece.file == nullptr) {
    convert(kernels, piece.memory, piece.from, piece.place, piece.to, piece.elements);
  } else if (piece.from == piece.to) {
    piece.file->read(piece.place, piece.elements * dtype_bytes(piece.from), piece.offset);
  } else {
    std::vector<std::byte> staging(static_cast<size_t>(piece.elements * dtype_bytes(piece.from)));
    piece.file->read(staging.data(), static_cast<int64_t>(staging.size()), piece.offset);
    convert(kernels, staging.data(), piece.from, piece.place, piece.to, piece.elements);
  }
}

// Moves all pieces with all members; member 0 reports progress between its pieces. The first
// failure, or a throwing progress callback, stops everyone and is rethrown.
void move_all(const std::vector<Piece>& pieces, const cpu::KernelTable& kernels,
              ThreadPool& threads, const std::function<void(int64_t, int64_t)>& progress) {
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.elements * dtype_bytes(piece.to);
  std::atomic<size_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  threads.run([&](Team& team) {
    try {
      while (!failed.load()) {
        const size_t i = next.fetch_add(1);
        if (i >= pieces.size()) break;
        move_piece(pieces[i], kernels);
        done += pieces[i].elements * dtype_bytes(pieces[i].to);
        if (team.worker() == 0 && progress) progress(done.load(), total);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
      failed = true;
    }
  });
  if (failure) std::rethrow_exception(failure);
  if (progress) progress(total, total);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Tensors in the order in which a step reads them, so that the arena is read front to back.
std::vector<TensorIndex> order_of_use(const Plan& plan) {
  std::vector<TensorIndex> order;
  std::vector<bool> seen(plan.tensors.size(), false);
  const auto use = [&](TensorIndex tensor) {
    if (tensor == kNoTensor || seen[static_cast<size_t>(tensor)]) return;
    seen[static_cast<size_t>(tensor)] = true;
    order.push_back(tensor);
  };
  const auto visit = [&](const auto& op) {
    using Type = std::decay_t<decltype(op)>;
    if constexpr (std::is_same_v<Type, EmbeddingOp> || std::is_same_v<Type, PositionEmbeddingOp>) {
      use(op.table);
    } else if constexpr (std::is_same_v<Type, NormOp>) {
      use(op.weight);
      use(op.bias);
    } else if constexpr (std::is_same_v<Type, LinearOp>) {
      for (const LinearOp::Part& part : op.parts) use(part.weight);
      for (const LinearOp::Part& part : op.parts) use(part.bias);
    }
  };
  for (const UnitSpec& unit : plan.units) {
    for (const Op& op : unit.ops) std::visit(visit, op);
  }
  return order;
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
         "\" has no source file in the plan and was not bound from memory");
  }
  if (it->second.shape != spec.shape) {
    fail(ErrorKind::kInvalid, "[load] tensor \"", spec.name, "\" has shape ",
         shape_text(it->second.shape), ", the plan says ", shape_text(spec.shape));
  }
  return &it->second;
}

}  // namespace

Weights::Weights(const Plan& plan, const EngineOptions& options, const cpu::KernelTable& kernels,
                 ThreadPool& threads)
    : data_(plan.tensors.size(), nullptr) {
  std::map<std::string, File> files;
  std::map<std::string, std::shared_ptr<void>> mappings;
  std::vector<std::pair<TensorIndex, int64_t>> placed;  // tensor, offset in the arena
  int64_t arena_bytes = 0;
  for (const TensorIndex index : order_of_use(plan)) {
    const TensorSpec& spec = plan.tensors[static_cast<size_t>(index)];
    bytes_ += spec.bytes();
    const TensorView* view = bound(options, spec);
    if (view != nullptr && view->dtype == spec.dtype) {
      data_[static_cast<size_t>(index)] = view->data;
      owners_.push_back(view->owner);
      continue;
    }
    if (view == nullptr) {
      const std::string path = options.directory + "/" + spec.source->file;
      const File& file = files.try_emplace(spec.source->file, path).first->second;
      const int64_t end = spec.source->offset + spec.elements() * dtype_bytes(spec.source->dtype);
      if (end > file.bytes()) {
        fail(ErrorKind::kIo, "[load] ", file.path(), " has ", file.bytes(), " bytes, tensor \"",
             spec.name, "\" ends at ", end, "; the file is truncated or not the planned one");
      }
      if (usable_in_place(options.loading, spec)) {
        std::shared_ptr<void>& mapping = mappings[spec.source->file];
        if (mapping == nullptr) owners_.push_back(mapping = file.map());
        data_[static_cast<size_t>(index)] =
            static_cast<const std::byte*>(mapping.get()) + spec.source->offset;
        continue;
      }
    }
    placed.emplace_back(index, arena_bytes);
    arena_bytes = align_up(arena_bytes + spec.bytes(), kCacheLine);
  }
  arena_ = Arena(arena_bytes, "the model's weights");

  std::vector<Piece> pieces;
  for (const auto& [index, place] : placed) {
    const TensorSpec& spec = plan.tensors[static_cast<size_t>(index)];
    data_[static_cast<size_t>(index)] = arena_.data() + place;
    const TensorView* view = bound(options, spec);
    const DType from = view != nullptr ? view->dtype : spec.source->dtype;
    for (int64_t begin = 0; begin < spec.elements(); begin += kPieceElements) {
      Piece piece;
      piece.from = from;
      piece.to = spec.dtype;
      piece.elements = std::min(kPieceElements, spec.elements() - begin);
      piece.place = arena_.data() + place + begin * dtype_bytes(spec.dtype);
      if (view != nullptr) {
        piece.memory = static_cast<const std::byte*>(view->data) + begin * dtype_bytes(from);
      } else {
        piece.file = &files.at(spec.source->file);
        piece.offset = spec.source->offset + begin * dtype_bytes(from);
      }
      pieces.push_back(piece);
    }
  }
  move_all(pieces, kernels, threads, options.progress);
}

}  // namespace helm
