// Parts of the CUDA plugin that its interface does not show, on the emulation: tables of a step,
// the workspace, products.
#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/step_tables.h"
#include "cuda/workspace.h"
#include "cuda_emulation.h"
#include "reference_blas.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

using helm::cuda::decode_blocks;
using helm::cuda::decode_splits;
using helm::cuda::prompt_blocks;
using helm::cuda::prompt_splits;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// The tables of a step in the device's memory, as the host reads them back.
class TablesOnDevice {
 public:
  explicit TablesOnDevice(const helm::Plan& plan)
      : layout(plan), memory_(static_cast<size_t>(layout.bytes)) {
    REQUIRE(cudaMalloc(&device_, memory_.size()) == cudaSuccess);
    upload = std::make_unique<helm::cuda::StepUpload>(plan, 0, device_);
  }
  ~TablesOnDevice() {
    upload.reset();
    CHECK(cudaFree(device_) == cudaSuccess);
  }
  TablesOnDevice(const TablesOnDevice&) = delete;
  TablesOnDevice& operator=(const TablesOnDevice&) = delete;

  // Enqueues the step; whether that copied anything.
  bool enqueue(const helm::StepView& step) {
    const int64_t before = cuda_emulation::uploads();
    upload->enqueue(step, stream_.handle());
    return cuda_emulation::uploads() - before == 1;
  }
  std::vector<int32_t> read(const void* from, size_t count) {
    std::vector<int32_t> values(count);
    stream_.download(values.data(),
                     static_cast<helm::DeviceAddress>(reinterpret_cast<uintptr_t>(from)),
                     static_cast<int64_t>(4 * count));
    stream_.synchronize();
    return values;
  }

  const helm::cuda::StepLayout layout;
  std::unique_ptr<helm::cuda::StepUpload> upload;

 private:
  std::vector<std::byte> memory_;
  void* device_ = nullptr;
  helm::cuda::CudaStream stream_{0};
};

helm::Plan three_layers() {
  helm::test::TinyShape shape;
  shape.layers = 3;
  shape.page_tokens = 4;
  return helm::Plan::from_json(helm::test::tiny_model(shape).plan);
}

using Ints = std::vector<int32_t>;

}  // namespace

TEST_CASE("the tables of a step survive what the host does next") {
  const auto plan = three_layers();
  TablesOnDevice on(plan);
  for (int32_t round = 0; round < 9; ++round) {  // more than there are staging blocks
    Ints ids = {round, 1, 2}, positions = {9, 10, 3}, outputs = {1, 2};
    Ints first(9), second(3);  // [blocks, 3]
    std::iota(first.begin(), first.end(), 10 * round);
    std::iota(second.begin(), second.end(), 50);
    const std::vector<helm::SequenceRun> runs = {{0, 2, 9, first.data()}, {2, 1, 3, second.data()}};
    CHECK(on.enqueue({ids, positions, outputs, runs}));
    ids = positions = outputs = {};
    std::ranges::fill(first, -1);
  }
  const helm::cuda::StepTables tables = on.upload->tables(0);
  CHECK(on.read(tables.token_ids, 3) == Ints{8, 1, 2});
  CHECK(on.read(tables.positions, 3) == Ints{9, 10, 3});
  CHECK(on.read(tables.output_rows, 2) == Ints{1, 2});
  CHECK(on.read(tables.row_runs, 3) == Ints{0, 0, 1});
  CHECK(on.read(tables.runs, 12) == Ints{0, 2, 9, 0, 0, 3, 2, 1, 3, 9, 0, 1});
  CHECK(on.read(tables.pages, 12) == Ints{80, 81, 82, 83, 84, 85, 86, 87, 88, 50, 51, 52});
  const Ints bits = on.read(on.upload->inverse_frequencies(0) + 1, 1);
  CHECK(std::bit_cast<float>(bits[0]) == plan.rope[0].inv_freq[1]);
}

TEST_CASE("the tables of a step carry the blocks that have pages only") {
  const auto plan = three_layers();
  TablesOnDevice on(plan);
  const Ints ids = {7, 8, 9, 6}, positions = {9, 3, 13, 14};
  const Ints first = {0, 1, 2, 3, 4, 5};  // [blocks, 3], from block 1 on
  const Ints last = {6, 7, 8};            // of block 3 alone
  const std::vector<helm::SequenceRun> runs = {{0, 1, 9, first.data(), 1},
                                               {2, 2, 13, last.data(), 3, 4}};
  CHECK(on.enqueue({ids, positions, {}, runs}));
  const helm::cuda::StepTables tables = on.upload->tables(0);
  CHECK(on.read(tables.row_runs, 4) == Ints{0, -1, 1, 1});  // row 1 has no run
  // The index of block 0, which has no entry: of the second run three blocks before its only page.
  CHECK(on.read(tables.runs, 12) == Ints{0, 1, 9, -3, 1, 3, 2, 2, 13, -3, 3, 4});
  CHECK(on.read(tables.pages, 9) == Ints{0, 1, 2, 3, 4, 5, 6, 7, 8});
}

TEST_CASE("the pieces of a step have one upload, with a table of all runs") {
  const auto plan = three_layers();  // of 4 sequences
  TablesOnDevice on(plan);
  const Ints ids = {7, 8}, positions = {30, 20};
  const Ints near = {1, 2, 3, 4, 5, 6}, other = {7, 8, 9}, visitor = {0, 0, 0};
  std::vector<helm::SequenceRun> runs = {{0, 1, 30, near.data(), 6}, {1, 1, 20, other.data(), 5}};
  for (int64_t block = 0; block < 6; ++block) {
    runs.push_back({0, 1, 30, visitor.data(), block, block + 1});
  }
  helm::StepView step{ids, positions, {}, runs, runs, helm::next_step_number()};
  CHECK(on.enqueue(step.piece(0, 2)));
  for (size_t i = 2; i < runs.size(); ++i) {
    CHECK_FALSE(on.enqueue(step.piece(i, 1)));
    const auto block = static_cast<int32_t>(i) - 2;
    const helm::cuda::StepTables tables = on.upload->tables(static_cast<int64_t>(i));
    const Ints run = on.read(tables.runs, 6);
    CHECK(run == Ints{0, 1, 30, 9 - 3 * block, block, block + 1});
    CHECK(on.read(tables.pages + run[3] + 3 * block, 3) == Ints{0, 0, 0});
  }
  CHECK_FALSE(on.enqueue(step.piece(0, 2)));
  CHECK(on.read(on.upload->tables(0).row_runs, 2) == Ints{0, 1});
  step.number = helm::next_step_number();
  CHECK(on.enqueue(step.piece(0, 2)));
  step.number = 0;
  CHECK(on.enqueue(step));
  CHECK(on.enqueue(step));
}

TEST_CASE("attention of a prompt is split into a power of two of pieces, none of few positions") {
  CHECK(prompt_splits(8, 1) == 1);
  CHECK(prompt_splits(8, 40 * 64) == 32);
  CHECK(prompt_splits(8, 40 * 64 + 1) == 32);
  CHECK(prompt_splits(8, 65) == 2);
  CHECK(prompt_splits(8, 1000000) == 64);
  CHECK(prompt_splits(24, 1000000) == 16);
  CHECK(prompt_splits(4096, 1000000) == 1);
  CHECK(prompt_splits(0, 1000000) == 512);
}

TEST_CASE(
    "attention of single tokens fills the multiprocessors once, by pieces of many positions") {
  // Four query heads to each of eight KV heads: 3 blocks on each of 132 multiprocessors.
  CHECK(decode_splits(132, 1, 32, 8, 1000000) == 49);
  CHECK(decode_splits(132, 1, 32, 8, 49 * 64) == 49);
  CHECK(decode_splits(132, 1, 32, 8, 48 * 64) == 32);  // few shapes while a context grows
  CHECK(decode_splits(132, 1, 32, 8, 1024) == 16);
  CHECK(decode_splits(132, 1, 32, 8, 65) == 2);
  CHECK(decode_splits(132, 1, 32, 8, 1) == 1);
  CHECK(decode_splits(132, 8, 32, 8, 1000000) == 6);
  CHECK(decode_splits(132, 49, 32, 8, 1000000) == 1);
  CHECK(decode_splits(132, 500, 32, 8, 1000000) == 1);
  CHECK(decode_splits(132, 1, 64, 8, 1000000) == 33);   // 2 blocks each, of eight heads
  CHECK(decode_splits(132, 1, 96, 8, 1000000) == 16);   // twelve heads are two blocks
  CHECK(decode_splits(132, 1, 8, 8, 1000000) == 115);   // 7 blocks each
  CHECK(decode_splits(1000, 1, 8, 8, 1000000) == 168);  // as on the largest GPU, for the planner
  CHECK(decode_splits(132, 0, 32, 8, 1000000) == 1);
  CHECK(decode_splits(132, 1, 0, 0, 1000000) == 1);  // as in the probe's stages of products
}

TEST_CASE("a short prompt behind a long context is split by the blocks that it has") {
  CHECK(decode_blocks(3, 32, 8) == 24);
  CHECK(decode_blocks(3, 72, 8) == 48);        // eight query heads a block
  CHECK(prompt_blocks(128, 32, 8) == 16 * 8);  // 8 tokens of 4 query heads a block
  CHECK(prompt_blocks(1, 32, 8) == 8);
  CHECK(prompt_blocks(9, 32, 8) == 16);
  CHECK(prompt_blocks(9, 0, 0) == 0);  // as in the probe's stages of products
  CHECK(prompt_splits(prompt_blocks(128, 32, 8), 32768) == 4);
  CHECK(prompt_splits(prompt_blocks(16, 32, 8), 32768) == 32);
}

TEST_CASE("a stage that CUDA cannot run is refused when it is compiled") {
  const auto plan = helm::Plan::from_json(helm::test::tiny_model().plan);
  helm::cuda::CudaDevice device({}, helm::test::reference_blas());
  const auto refused = [&](const helm::Op& op) {
    const std::vector<helm::UnitSpec> units = {{.name = "unit", .device = 1, .ops = {op}}};
    helm::StageSpec spec;
    spec.plan = &plan;
    spec.units = units;
    spec.weights.resize(plan.tensors.size());
    spec.values.resize(plan.values.size());
    spec.kv.resize(plan.kv.layers.size());
    spec.workspace = device.allocate(device.workspace_bytes(plan, units), "a test");
    try {
      device.compile(spec);
    } catch (const helm::Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  helm::AttentionOp wide{};
  wide.heads = wide.kv_heads = 1;
  wide.head_dim = 257;
  CHECK(contains(refused(wide), "heads of 257 elements, at most 256"));
  helm::AttendOp wide_piece{};
  wide_piece.heads = wide_piece.kv_heads = 1;
  wide_piece.head_dim = 257;
  CHECK(contains(refused(wide_piece), "heads of 257 elements, at most 256"));
}

TEST_CASE("parts of a product whose weights follow each other are one launch, with the same bits") {
  const auto plan = helm::Plan::from_json(helm::test::tiny_model().plan);
  const helm::LinearOp* linear = nullptr;
  for (const helm::Op& op : plan.units[1].ops) {
    const auto* found = std::get_if<helm::LinearOp>(&op);
    if (linear == nullptr && found != nullptr && found->parts.size() == 3) linear = found;
  }
  REQUIRE(linear != nullptr);
  const std::vector<helm::UnitSpec> units = {{.name = "products", .device = 1, .ops = {*linear}}};
  helm::cuda::CudaDevice device({}, helm::test::reference_blas());
  const auto stream = device.create_stream();
  constexpr int64_t kTokens = 3;
  const int64_t width = plan.values[static_cast<size_t>(linear->in)].width;
  const int64_t out_width = plan.values[static_cast<size_t>(linear->out)].width;
  const std::vector<float> inputs = helm::test::random_floats(kTokens * width, 1);
  std::vector<std::vector<float>> outputs;
  for (const int64_t gap : {0, 256}) {
    const auto buffer = [&](int64_t bytes) { return device.allocate(bytes, "the test"); };
    helm::StageSpec spec;
    spec.plan = &plan;
    spec.units = units;
    spec.workspace = buffer(device.workspace_bytes(plan, units));
    spec.values.resize(plan.values.size());
    spec.kv.resize(plan.kv.layers.size());
    spec.values[static_cast<size_t>(linear->in)] = buffer(kTokens * width * 4);
    spec.values[static_cast<size_t>(linear->out)] = buffer(kTokens * out_width * 4);
    spec.weights.resize(plan.tensors.size());
    int64_t place = 0;
    const helm::DeviceAddress weights = buffer(out_width * width * 4 + 3 * 256);
    for (const helm::LinearOp::Part& part : linear->parts) {
      const int64_t rows = plan.tensors[static_cast<size_t>(part.weight)].shape[0];
      const auto to = static_cast<helm::DeviceAddress>(static_cast<uintptr_t>(weights) +
                                                       static_cast<uintptr_t>(place));
      const auto values = helm::test::random_floats(rows * width, static_cast<uint32_t>(rows));
      stream->upload(to, values.data(), rows * width * 4);
      stream->synchronize();
      spec.weights[static_cast<size_t>(part.weight)].address = to;
      place += rows * width * 4 + gap;
    }
    stream->upload(spec.values[static_cast<size_t>(linear->in)], inputs.data(),
                   kTokens * width * 4);
    const auto stage = device.compile(spec);
    const std::vector<int32_t> ids(kTokens), positions = {0, 1, 2};
    std::vector<int32_t> pages(plan.kv.layers.size());
    const std::vector<helm::SequenceRun> runs = {{0, kTokens, 0, pages.data()}};
    const int64_t before = cuda_emulation::launches();
    stage->run(*stream, {ids, positions, {}, runs});
    CHECK(cuda_emulation::launches() - before == (gap == 0 ? 1 : 3));
    outputs.emplace_back(static_cast<size_t>(kTokens * out_width));
    stream->download(outputs.back().data(), spec.values[static_cast<size_t>(linear->out)],
                     kTokens * out_width * 4);
    stream->synchronize();
  }
  CHECK(outputs[0] == outputs[1]);
}

TEST_CASE("the workspace follows its formula") {
  helm::test::TinyShape shape;
  shape.weight_dtype = "f16";
  const auto plan = helm::Plan::from_json(helm::test::tiny_model(shape).plan);
  const helm::cuda::WorkspaceLayout layout(plan, plan.units, int64_t{8} << 20, 40);
  CHECK(layout.blas_bytes == int64_t{8} << 20);
  CHECK(layout.second_tables == (helm::cuda::StepLayout(plan).bytes + 255) / 256 * 256);
  CHECK(layout.blas_offset == (plan.limits.sequences > 1 ? 2 : 1) * layout.second_tables);
  CHECK(layout.narrow_offset == layout.blas_offset + layout.blas_bytes);
  CHECK(layout.partials_offset - layout.narrow_offset == 32 * 40 * 2);  // rows * widest input
  int64_t partials = 0;
  for (int64_t tokens = 1; tokens <= 32; ++tokens) {
    const int64_t context = plan.limits.context;
    const int64_t of_prompts = prompt_splits(prompt_blocks(tokens, 4, 2), context);
    const int64_t of_singles =
        tokens > plan.limits.sequences ? 1 : decode_splits(40, tokens, 4, 2, context);
    for (const int64_t splits : {of_prompts, of_singles}) {
      partials = std::max(partials, helm::cuda::attention_partials_bytes(tokens, 4, 10, splits));
    }
  }
  CHECK(layout.bytes - layout.partials_offset == (partials + 255) / 256 * 256);
}

TEST_CASE("work that fails on the GPU surfaces where the host waits, and nothing leaks") {
  size_t free_before = 0;
  size_t total = 0;
  REQUIRE(cudaMemGetInfo(&free_before, &total) == cudaSuccess);
  {
    helm::cuda::CudaDevice device({}, helm::test::reference_blas());
    const auto stream = device.create_stream();
    const auto event = device.create_event();
    device.allocate(1000, "never released");
    stream->record(*event);
    stream->synchronize();
    cuda_emulation::report_fault("an illegal access of the test");
    CHECK_THROWS_AS(stream->synchronize(), helm::Error);
    CHECK_THROWS_AS(event->synchronize(), helm::Error);
  }
  cuda_emulation::clear_fault();
  size_t free_after = 0;
  REQUIRE(cudaMemGetInfo(&free_after, &total) == cudaSuccess);
  CHECK(free_after == free_before);
  CHECK(helm::test::live_blas_handles() == 0);
}
