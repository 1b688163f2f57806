// Parts of tensors: whatever stores a matrix, and whatever it becomes, a part has the values that
// the whole has in its rectangle, on either device; and a digest does not tell what was cut.
#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "cpu/compression.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "device/registry.h"
#include "part_sources.h"
#include "support/check.h"
#include "support/host_memory.h"
#include "tiny_model.h"
#include "weights/digest.h"
#include "weights/packed.h"
#include "weights/store.h"

using namespace helm;

namespace {

using test::kCols;
using test::kName;
using test::kRows;
using test::Source;
using test::Sources;

struct Rectangle {
  int64_t row, end_row, col, end_col;
};
using Cut = std::vector<Rectangle>;

// A row border that no strip has, a column border that spans have; only rows, at a strip's border.
const Cut kCross = {
    {0, 40, 0, 256}, {0, 40, 256, kCols}, {40, kRows, 0, 512}, {40, kRows, 512, kCols}};
const Cut kRowsOnly = {{0, 48, 0, kCols}, {48, kRows, 0, kCols}};

EngineOptions options_of(const test::TinyFolder& folder) {
  EngineOptions options;
  options.directory = folder.path();
  return options;
}

// A plan with that tensor, or with parts of it, which the devices hold in turn from `first` on.
Plan plan_of(const std::optional<TensorSource>& source, const Format& format, const Cut& cut,
             DeviceIndex first, bool in_turn) {
  Plan plan;
  plan.devices.push_back({"accelerator", DeviceKind::kAccelerator});
  plan.values = {{"in", kCols, false}, {"out", kRows, false}};
  plan.units.resize(2);
  plan.units[1].device = Plan::kFirstAccelerator;
  const auto add = [&](TensorSpec spec, DeviceIndex device) {
    const auto index = static_cast<TensorIndex>(plan.tensors.size());
    spec.source = source;
    plan.tensors.push_back(std::move(spec));
    plan.slices.push_back({index, device, format, SliceSpec::Access::kResident});
    plan.units[static_cast<size_t>(device)].ops.emplace_back(
        LinearOp{0, 1, {{index, kNoTensor}}, false});
  };
  if (cut.empty()) add({kName, {kRows, kCols}, {}, {}}, first);
  for (size_t i = 0; i < cut.size(); ++i) {
    const Rectangle& r = cut[i];
    add({"part " + std::to_string(i),
         {r.end_row - r.row, r.end_col - r.col},
         {},
         TensorPart{kName, {kRows, kCols}, r.row, r.col}},
        in_turn ? static_cast<DeviceIndex>((static_cast<size_t>(first) + i) % 2) : first);
  }
  return plan;
}

class Loaded {
 public:
  Loaded(Plan plan, const EngineOptions& options)
      : plan_(std::move(plan)),
        threads_(2),
        host_(threads_),
        sim_(open_accelerator("sim")),
        account_(*sim_, Plan::kUnlimited),
        weights_(plan_, options, cpu::select_kernels(), threads_, host_.account, &account_) {}

  std::string digest() {
    return weights_digest(plan_, weights_, cpu::select_kernels(), sim_.get());
  }
  const Weights& weights() const { return weights_; }

  // All values of a tensor, in f32.
  std::vector<float> values(size_t tensor) {
    const SliceSpec& slice = plan_.slices.at(tensor);
    const TensorSpec& spec = plan_.tensors[tensor];
    const Weight& held = weights_.on(slice.device)[tensor];
    CHECK(held.format == slice.format);
    const int64_t size = plan_.bytes(slice);
    const Arena bytes(size, "a tensor");
    if (slice.device == kCpu) {
      std::memcpy(bytes.data(), cpu::host_pointer(held.address), static_cast<size_t>(size));
    } else {
      const auto stream = sim_->create_stream();
      stream->download(bytes.data(), held.address, size);
      stream->synchronize();
    }
    std::vector<float> all(static_cast<size_t>(spec.rows() * spec.cols()));
    for (int64_t row = 0; row < spec.rows(); ++row) {
      read_row(slice.format, spec, bytes.data(), row, all.data() + row * spec.cols());
    }
    return all;
  }

 private:
  static void read_row(const Format& format, const TensorSpec& spec, const std::byte* bytes,
                       int64_t row, float* out) {
    const int64_t cols = spec.cols();
    const cpu::KernelTable& kernels = cpu::select_kernels();
    if (is_packed(format)) {
      return PackedMatrix(spec.name, format, bytes, spec.rows(), cols).read_row(row, out);
    }
    if (format.codes == Codes::kBF16C) {
      std::vector<uint16_t> plain(static_cast<size_t>(cols));
      cpu::read_compressed(kernels, cpu::CompressedMatrix::at(bytes, spec.rows(), cols), row, 0,
                           cols, plain.data());
      return kernels.widen[static_cast<int>(DType::kBF16)](plain.data(), out, cols);
    }
    const DType type = dtype_of(format);
    kernels.widen[static_cast<int>(type)](bytes + row * cols * dtype_bytes(type), out, cols);
  }

  Plan plan_;
  ThreadPool threads_;
  test::HostMemory host_;
  std::unique_ptr<Device> sim_;
  Account account_;
  Weights weights_;
};

void check_parts(Loaded& parts, const Cut& cut, const std::vector<float>& whole) {
  for (size_t i = 0; i < cut.size(); ++i) {
    const Rectangle& r = cut[i];
    const std::vector<float> own = parts.values(i);
    const int64_t cols = r.end_col - r.col;
    for (int64_t row = r.row; row < r.end_row; ++row) {
      const bool same =
          std::memcmp(own.data() + (row - r.row) * cols, whole.data() + row * kCols + r.col,
                      static_cast<size_t>(cols) * sizeof(float)) == 0;
      REQUIRE_MESSAGE(same, "part " << i << " row " << row);
    }
  }
}

}  // namespace

TEST_CASE("parts have the values of the whole in their rectangles, whatever stores them") {
  const test::TinyFolder folder;
  const EngineOptions options = options_of(folder);
  int turn = 0;  // of a few, each third has other cuts and devices of other sources and formats
  for (const Source& source : test::all_sources(folder.path())) {
    for (const std::string& name : source.formats) {
      CAPTURE(source.what);
      CAPTURE(name);
      const Format format = format_from_name(name);
      const bool anywhere = format.codes != Codes::kBF16C;  // which the CPU alone has
      Loaded whole(plan_of(source.source, format, {}, kCpu, false), options);
      const std::vector<float> want = whole.values(0);
      for (const Cut& cut : {kCross, kRowsOnly}) {
        for (const DeviceIndex first : {kCpu, Plan::kFirstAccelerator}) {
          if (first != kCpu && !anywhere) continue;
          if (test::kFew && anywhere && turn++ % 3 != 0) continue;
          Loaded parts(plan_of(source.source, format, cut, first, anywhere), options);
          check_parts(parts, cut, want);
          CHECK(parts.digest() == whole.digest());
        }
      }
    }
  }
}

TEST_CASE("columns of elements are cut at any 32") {
  const Cut narrow = {{0, kRows, 0, 96}, {0, kRows, 96, kCols}};
  const test::TinyFolder folder;
  const EngineOptions options = options_of(folder);
  const Source source = Sources(folder.path()).dense(Stored::kBF16);
  for (const char* name : {"f32", "bf16", "c8.s32", "bf16c"}) {
    CAPTURE(name);
    const Format format = format_from_name(name);
    Loaded whole(plan_of(source.source, format, {}, kCpu, false), options);
    Loaded parts(plan_of(source.source, format, narrow, kCpu, false), options);
    check_parts(parts, narrow, whole.values(0));
    CHECK(parts.digest() == whole.digest());
  }
}

TEST_CASE("parts are taken from a tensor that is bound under the name of the whole") {
  const auto data = std::make_shared<std::vector<float>>(test::random_floats(kRows * kCols, 11));
  EngineOptions options;
  options.tensors[kName] = {data->data(), DType::kF32, {kRows, kCols}, data};
  for (const char* name : {"f32", "bf16", "c8.s32", "bf16c"}) {
    CAPTURE(name);
    const Format format = format_from_name(name);
    Loaded whole(plan_of({}, format, {}, kCpu, false), options);
    for (const Cut& cut : {kCross, kRowsOnly}) {
      Loaded parts(plan_of({}, format, cut, kCpu, format.codes != Codes::kBF16C), options);
      check_parts(parts, cut, whole.values(0));
      if (format == Format{} && cut.size() == kRowsOnly.size()) {  // where it lies
        CHECK(cpu::host_pointer<float>(parts.weights().on(kCpu)[0].address) == data->data());
      }
    }
  }
  options.tensors[kName].shape = {kRows, kCols - 1};
  CHECK_THROWS_WITH_AS(Loaded(plan_of({}, Format{}, kCross, kCpu, false), options),
                       doctest::Contains("[96, 767], the plan says [96, 768]"), Error);
}

TEST_CASE("a part that lies in what a device holds of the whole takes no memory") {
  const auto data = std::make_shared<std::vector<float>>(test::random_floats(kRows * kCols, 11));
  EngineOptions options;
  options.tensors[kName] = {data->data(), DType::kF32, {kRows, kCols}, data};
  const Cut cut = {{0, 40, 0, kCols}, {40, 48, 0, kCols}, {48, kRows, 0, kCols}};
  for (const char* name : {"f32", "bf16", "c8.s32", "bf16c"}) {
    for (const DeviceIndex device : {kCpu, Plan::kFirstAccelerator}) {
      const Format format = format_from_name(name);
      const bool compressed = format.codes == Codes::kBF16C;
      if (compressed && device != kCpu) continue;
      CAPTURE(name);
      CAPTURE(device);
      Plan plan = plan_of({}, format, cut, device, false);
      const auto index = static_cast<TensorIndex>(plan.tensors.size());
      plan.tensors.push_back({kName, {kRows, kCols}, {}, {}});
      plan.slices.push_back({index, device, format, SliceSpec::Access::kResident});
      plan.units[static_cast<size_t>(device)].ops.emplace_back(EmbeddingOp{index, 0});
      for (size_t i = 0; i < cut.size(); ++i) plan.tensors[i].part->whole = index;
      Loaded all(plan, options);
      check_parts(all, cut, all.values(3));
      const std::vector<Weight>& held = all.weights().on(device);
      int64_t bytes = plan.bytes(plan.slices[3]);
      for (size_t i = 0; i < cut.size(); ++i) {
        const bool apart = compressed || cut[i].row % row_unit(format) != 0;
        if (apart) bytes += plan.bytes(plan.slices[i]);
        const int64_t offset = format_bytes(format, cut[i].row, kCols);
        if (!apart) CHECK(held[i].address == held[3].address + offset);
      }
      const Weights& weights = all.weights();
      CHECK((device == kCpu ? weights.cpu_bytes() : weights.accelerator_bytes()) == bytes);
      Loaded whole(plan_of({}, format, {}, device, false), options);
      CHECK(all.digest() == whole.digest());
    }
  }
}

TEST_CASE("whole rows of a part are read where their file is mapped") {
  const test::TinyFolder folder;
  const EngineOptions options = options_of(folder);
  Sources sources(folder.path());
  for (const Stored stored : {Stored::kC8S32, Stored::kC4KM32}) {
    const Source source = sources.strips(stored);
    const Format format = row_of(stored).exact;
    Loaded whole(plan_of(source.source, format, {}, kCpu, false), options);
    Plan plan = plan_of(source.source, format, kRowsOnly, kCpu, false);
    for (SliceSpec& slice : plan.slices) slice.access = SliceSpec::Access::kMapped;
    Loaded parts(plan, options);
    CHECK(parts.weights().copied_bytes() == 0);
    check_parts(parts, kRowsOnly, whole.values(0));
    CHECK(parts.digest() == whole.digest());
  }
}
