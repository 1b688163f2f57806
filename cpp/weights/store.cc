#include "weights/store.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <system_error>

#include "cpu/stage.h"
#include "plan/stages.h"
#include "weights/finite.h"
#include "weights/first_touch.h"
#include "weights/reads.h"
#include "weights/sinks.h"
#include "weights/stored_matrix.h"

namespace helm {
namespace {

// Large enough to amortise a system call, small enough that the last reads spread over threads.
constexpr int64_t kReadElements = int64_t{1} << 21;
// Page-locked buffers of all threads together, but for at least kLeastUploadBytes each.
constexpr int64_t kUploadBytes = int64_t{64} << 20;
constexpr int64_t kLeastUploadBytes = int64_t{1} << 20;

// Does all reads with all members, each its own; member 0 reports progress between its reads. The
// first failure, or a throwing progress callback, stops everyone and is rethrown.
void do_all(const std::vector<Read>& reads, ThreadPool& threads, Uploader* uploader,
            const Progress& progress) {
  const auto bytes_of = [](const Read& read) {
    return read_bytes(read.to->format(), read.rows, read.from->spec().cols());
  };
  int64_t total = 0;
  std::vector<int> owners;
  for (const Read& read : reads) {
    total += bytes_of(read);
    owners.push_back(read.owner);
  }
  std::atomic<int64_t> done{0};
  run_owned(threads, owners, nodes_of(threads), [&](size_t i, Team& team) {
    reads[i].to->take(reads[i], team.worker());
    done += bytes_of(reads[i]);
    if (team.worker() == 0 && progress) {
      team.as_caller([&] { progress(done.load(), total); });
    }
  });
  if (uploader != nullptr) uploader->finish();
  if (progress) progress(total, total);
}

}  // namespace

Placed placed_in_order(const Plan& plan, const std::vector<TensorIndex>& tensors,
                       DeviceIndex device) {
  Placed placed;
  int64_t end = 0;
  for (const TensorIndex index : tensors) {
    const int64_t begin = align_up(end, kDeviceAlignment);
    placed.emplace_back(index, begin);
    end = begin + plan.bytes(*plan.slice(index, device));
  }
  return placed;
}

// One load: finds out where each slice goes, then reads.
class Weights::Load {
 public:
  Load(Weights& to, const Plan& plan, const EngineOptions& options, const cpu::KernelTable& kernels,
       ThreadPool& threads)
      : to_(to),
        plan_(plan),
        options_(options),
        kernels_(kernels),
        threads_(threads),
        files_(options.directory),
        on_cpu_(units_on(kCpu, resident_units(plan))) {}

  // What can be used where it lies; offsets in the arena for the rest.
  void place_on_cpu(Account& cpu) {
    int64_t bytes = 0;
    for (const TensorIndex index : tensors_on(plan_, kCpu)) {
      const SliceSpec& slice = *plan_.slice(index, kCpu);
      held(slice).format = slice.format;
      if (slice.access == SliceSpec::Access::kDisk) continue;
      bytes += plan_.own_bytes(slice);
      if (lies_in_whole(slice)) continue;
      if (use_in_place(slice, stored(slice))) continue;
      Copies& own = copies_[slice.node];
      own.placed.emplace_back(index, own.arena_bytes);
      own.arena_bytes = align_up(own.arena_bytes + plan_.bytes(slice), kCacheLine);
      if (slice.node != kAnyNode) to_.node_bytes_[slice.node] += plan_.bytes(slice);
    }
    to_.cpu_bytes_ = Claim(cpu, bytes, "the model's weights");
  }

  void read_to_accelerator(Account& cpu, DeviceIndex device, Account& accelerator) {
    std::vector<TensorIndex> own = tensors_on(plan_, device);
    std::erase_if(own, [&](TensorIndex t) { return lies_in_whole(*plan_.slice(t, device)); });
    const Placed placed = placed_in_order(plan_, own, device);
    if (placed.empty()) return;
    const auto& [last, offset_of_last] = placed.back();
    to_.accelerator_memory_ =
        DeviceMemory(accelerator, offset_of_last + plan_.bytes(*plan_.slice(last, device)),
                     "the model's weights");
    const int64_t buffer_bytes = std::clamp(kUploadBytes / (2 * threads_.size()), kLeastUploadBytes,
                                            kReadElements * int64_t{sizeof(float)});
    const auto anyone_s = decode_shares(plan_, std::vector<bool>(on_cpu_.size(), false), 1);
    int64_t largest = 0;
    for (const auto& [index, offset] : placed) {
      const SliceSpec& slice = *plan_.slice(index, device);
      const DeviceAddress address = to_.accelerator_memory_.address() + offset;
      held(slice) = {address, slice.format};
      const size_t first = reads_.size();
      sinks_.push_back(std::make_unique<UploadSink>(slice.format, kernels_, uploader_, address));
      cut(stored(slice), *sinks_.back(), anyone_s[static_cast<size_t>(index)],
          row_unit(slice.format), buffer_bytes / int64_t{sizeof(float)}, reads_);
      for (size_t i = first; i < reads_.size(); ++i) {
        largest = std::max(
            largest, format_bytes(slice.format, reads_[i].rows, reads_[i].from->spec().cols()));
      }
    }
    uploader_ = std::make_unique<Uploader>(accelerator.device(), cpu, threads_.size(), largest);
  }

  void read_to_arena() {
    const auto by_reader = decode_shares(plan_, on_cpu_, threads_.size());
    for (const auto& [node, copies] : copies_) {
      const Arena& arena = arena_on(node, copies.arena_bytes);
      for (const auto& [index, offset] : copies.placed) {
        const SliceSpec& slice = *plan_.slice(index, kCpu);
        std::byte* place = arena.data() + offset;
        held(slice).address = cpu::device_address(place);
        sinks_.push_back(host_sink(slice, place));
        cut(stored(slice), *sinks_.back(), by_reader[static_cast<size_t>(index)],
            row_unit(slice.format), kReadElements, reads_);
      }
    }
  }

  // Begins to read what steps need first.
  void open_disk(Account& cpu) {
    DiskLayout layout = disk_layout(plan_);
    if (layout.units.empty()) return;
    to_.ring_bytes_ = Claim(cpu, plan_.schedule.disk_ring_bytes, "weights read from disk");
    std::vector<std::string> drives = {options_.directory};
    drives.insert(drives.end(), options_.copies.begin(), options_.copies.end());
    to_.disk_ = std::make_unique<DiskRing>(std::move(layout), to_.ring_bytes_.bytes(), drives,
                                           system_file_calls(), options_.pace.disk_bytes_per_s);
    for (const DiskUnit& unit : to_.disk_->layout().units) {
      for (const auto& [index, place] : unit.tensors) {
        held(*plan_.slice(index, kCpu)).address = cpu::device_address(to_.disk_->data() + place);
      }
    }
  }

  void finish() {
    for (const SliceSpec& slice : plan_.slices) {
      if (lies_in_whole(slice)) use_whole(slice);
    }
    do_all(reads_, threads_, uploader_.get(), options_.progress);
    files_.check();
  }

 private:
  bool lies_in_whole(const SliceSpec& slice) const { return plan_.holder(slice) != nullptr; }

  const Arena& arena_on(int node, int64_t bytes) {
    Arena& arena = to_.arenas_[node] = Arena(bytes, "the model's weights");
    if (node == kAnyNode) return arena;
    const auto& bind = options_.bind_memory;
    const int error = bind ? bind(arena.data(), arena.bytes(), node)
                           : bind_memory(arena.data(), arena.bytes(), node);
    if (error == 0) return arena;
    fail(ErrorKind::kMemory, "[load] the system refused to place ", bytes,
         " bytes of weights on memory node ", node, " (", std::generic_category().message(error),
         "); measure the machine and make the plan anew");
  }

  // Of a part whose rows are some of what the device holds: those.
  void use_whole(const SliceSpec& slice) {
    const TensorSpec& spec = plan_.tensors[static_cast<size_t>(slice.tensor)];
    const int64_t offset = format_bytes(slice.format, spec.part->row, spec.cols());
    held(slice) = {held(*plan_.holder(slice)).address + offset, slice.format};
  }

  Weight& held(const SliceSpec& slice) {
    return to_.on_[static_cast<size_t>(slice.device)][static_cast<size_t>(slice.tensor)];
  }

  // What a slice is made of. Throws Error{kInvalid} for a format that it cannot become.
  const StoredTensor& stored(const SliceSpec& slice) {
    const TensorSpec& spec = plan_.tensors[static_cast<size_t>(slice.tensor)];
    auto found = stored_.find(slice.tensor);
    if (found == stored_.end()) {
      found = stored_.try_emplace(slice.tensor, spec, options_, files_).first;
    }
    const Stored from = found->second.stored();
    if (!encodes(from, slice.format)) refuse_format(spec.name, row_of(from).exact, slice.format);
    if (!found->second.same_bytes(slice.format)) found->second.open(slice.format);
    return found->second;
  }

  // A bound tensor whose dtype is the format, or one that is to be mapped.
  bool use_in_place(const SliceSpec& slice, const StoredTensor& from) {
    DeviceAddress& address = held(slice).address;
    if (const TensorView* view = from.view()) {
      if (!from.same_bytes(slice.format) || !from.whole_rows()) return false;
      address = cpu::device_address(from.memory(0));
      to_.owners_.push_back(view->owner);
      return true;
    }
    if (slice.access != SliceSpec::Access::kMapped) return false;
    std::shared_ptr<MappedFile>& mapping = mappings_[&from.file()];
    if (mapping == nullptr) to_.mapped_.push_back(mapping = from.file().map());
    const std::byte* place = mapping->data() + from.offset();
    address = cpu::device_address(place);
    note_mapped(slice, from, place);
    return true;
  }

  // A vector is looked at here, the scales of a packed matrix where they may be to blame.
  void note_mapped(const SliceSpec& slice, const StoredTensor& from, const std::byte* place) {
    const TensorSpec& spec = from.spec();
    if (!spec.is_matrix()) {
      const auto* elements = reinterpret_cast<const float*>(place);
      from.check_finite(0, {elements, static_cast<size_t>(spec.rows())});
    } else if (is_packed(slice.format)) {
      to_.unseen_.emplace_back(spec.name, slice.format, place, spec.rows(), spec.cols());
      to_.unseen_.back().comes_from(std::string(from.file_of(0)));
    }
  }

  std::unique_ptr<Sink> host_sink(const SliceSpec& slice, std::byte* place) const {
    const TensorSpec& spec = plan_.tensors[static_cast<size_t>(slice.tensor)];
    if (slice.format.codes == Codes::kBF16C) {
      return std::make_unique<EncodeSink>(slice.format, kernels_, place, spec.rows(), spec.cols());
    }
    return std::make_unique<ArenaSink>(slice.format, kernels_, place);
  }

  Weights& to_;
  const Plan& plan_;
  const EngineOptions& options_;
  const cpu::KernelTable& kernels_;
  ThreadPool& threads_;
  WeightFiles files_;
  const std::vector<bool> on_cpu_;  // by unit
  std::map<TensorIndex, StoredTensor> stored_;
  std::map<const WeightFile*, std::shared_ptr<MappedFile>> mappings_;
  struct Copies {
    Placed placed;
    int64_t arena_bytes = 0;
  };
  std::map<int, Copies> copies_;        // by memory node
  std::unique_ptr<Uploader> uploader_;  // null where nothing goes up
  std::vector<std::unique_ptr<Sink>> sinks_;
  std::vector<Read> reads_;
};

Weights::Weights(const Plan& plan, const EngineOptions& options, const cpu::KernelTable& kernels,
                 ThreadPool& threads, Account& cpu, Account* accelerator)
    : on_(plan.devices.size(), std::vector<Weight>(plan.tensors.size())) {
  Load load(*this, plan, options, kernels, threads);
  load.place_on_cpu(cpu);
  if (accelerator != nullptr) load.read_to_accelerator(cpu, Plan::kFirstAccelerator, *accelerator);
  load.read_to_arena();
  load.finish();
  load.open_disk(cpu);
  huge_page_bytes_ = 0;
  for (const auto& [node, arena] : arenas_) {
    const std::optional<int64_t> own = arena.huge_page_bytes();
    if (!own) huge_page_bytes_ = std::nullopt;
    if (huge_page_bytes_) *huge_page_bytes_ += *own;
  }
}

int64_t Weights::copied_bytes() const {
  int64_t bytes = 0;
  for (const auto& [node, arena] : arenas_) bytes += arena.bytes();
  return bytes;
}

bool Weights::huge_pages() const {
  return std::any_of(arenas_.begin(), arenas_.end(),
                     [](const auto& own) { return own.second.huge_pages(); });
}

void Weights::check_scales(std::span<const float> logits) {
  const auto* bits = reinterpret_cast<const uint32_t*>(logits.data());
  if (unseen_.empty() || all_finite(bits, std::ssize(logits), kExponentF32)) return;
  for (const PackedMatrix& matrix : unseen_) matrix.check_scales();
  unseen_.clear();
}

void Weights::check_files(bool used) const {
  for (const auto& file : mapped_) file->check(used);
  if (disk_ != nullptr) disk_->check();
}

}  // namespace helm
