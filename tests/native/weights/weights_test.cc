// The loader of weights: rows from several files and in memory, in every dense format.
#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cpu/compression.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "oracle.h"
#include "support/check.h"
#include "support/host_memory.h"
#include "tiny_model.h"
#include "weights/store.h"

namespace {

using helm::DType;
using helm::Plan;
using helm::ThreadPool;
using helm::Weights;
using helm::test::TinyModel;
using nlohmann::json;

constexpr const char* kDenseNames[] = {"f32", "f16", "bf16"};

// Cuts a tensor's rows in three files: the first dense and in reverse order of the others, the
// second among rows of others, the third behind an odd number of bytes. They stand for `data` in
// `stored`.
json three_files(const std::string& folder, const std::string& name, const char* stored,
                 const std::vector<float>& data, int64_t rows) {
  const DType dtype = helm::dtype_from_name(stored);
  const std::vector<unsigned char> bytes = helm::test::encode(dtype, data);
  const auto row_bytes = static_cast<int64_t>(bytes.size()) / rows;
  const int64_t ends[] = {0, rows / 3, rows / 2, rows};
  const int64_t strides[] = {0, 2 * row_bytes + 6, row_bytes}, offsets[] = {0, 10, 3};
  json extents = json::array();
  for (int i = 0; i < 3; ++i) {
    const int64_t count = ends[i + 1] - ends[i];
    if (count == 0) continue;
    const std::string file = name + "." + std::to_string(i);
    const int64_t stride = strides[i] > 0 ? strides[i] : row_bytes;
    std::string content(static_cast<size_t>(offsets[i] + count * stride), '\x7f');
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(content.data() + offsets[i] + r * stride,
                  bytes.data() + (ends[i] + r) * row_bytes, static_cast<size_t>(row_bytes));
    }
    content.resize(content.size() - static_cast<size_t>(stride - row_bytes));  // ends with a row
    std::ofstream(folder + "/" + file, std::ios::binary) << content;
    extents.push_back({{"file", file},
                       {"offset", offsets[i]},
                       {"rows", count},
                       {"row_stride", i == 1 ? stride : 0}});
  }
  return {{"stored", stored}, {"extents", extents}};
}

// All tensors of the model in three files each.
json split(const TinyModel& model, const std::string& folder, const char* stored) {
  json plan = json::parse(model.plan);
  for (json& tensor : plan["tensors"]) {
    const std::string name = tensor["name"];
    tensor["source"] = three_files(folder, name, stored, *model.tensors.at(name).data,
                                   tensor["shape"][0].get<int64_t>());
  }
  return plan;
}

// The bytes that a tensor has in a format, by way of what it is stored in.
std::vector<unsigned char> expected(const std::vector<float>& data, DType stored, DType format) {
  const std::vector<unsigned char> bytes = helm::test::encode(stored, data);
  if (stored == format) return bytes;
  std::vector<float> wide;
  for (size_t i = 0; i < data.size(); ++i) {
    wide.push_back(static_cast<float>(helm::test::decode(stored, bytes.data(), i)));
  }
  return helm::test::encode(format, wide);
}

helm::test::TinyShape shape_of(const char* format) {
  helm::test::TinyShape shape;
  shape.hidden = 40;
  shape.weight_dtype = format;
  shape.qkv_bias = true;
  shape.threads = 3;
  return shape;
}

}  // namespace

TEST_CASE("rows are stacked from three files, and rows between them are skipped") {
  const helm::test::TinyFolder folder;
  const helm::cpu::KernelTable& kernels = *helm::cpu::kernels_scalar();
  for (const char* stored : kDenseNames) {
    for (const char* format : kDenseNames) {
      CAPTURE(std::string(stored));
      CAPTURE(std::string(format));
      const TinyModel model = helm::test::tiny_model(shape_of(format));
      const Plan plan = Plan::from_json(split(model, folder.path(), stored).dump());
      helm::EngineOptions options;
      options.directory = folder.path();
      ThreadPool threads(3);
      helm::test::HostMemory host(threads);
      const Weights weights(plan, options, kernels, threads, host.account, nullptr);
      for (const helm::SliceSpec& slice : plan.slices) {
        const helm::TensorSpec& spec = plan.tensors[static_cast<size_t>(slice.tensor)];
        const auto want = expected(*model.tensors.at(spec.name).data, helm::dtype_from_name(stored),
                                   helm::dtype_of(slice.format));
        const helm::Weight& got = weights.on(helm::kCpu)[static_cast<size_t>(slice.tensor)];
        CHECK(got.format == slice.format);
        REQUIRE(static_cast<int64_t>(want.size()) == plan.bytes(slice));
        CHECK_MESSAGE(
            std::memcmp(helm::cpu::host_pointer(got.address), want.data(), want.size()) == 0,
            spec.name);
      }
    }
  }
}

TEST_CASE("an engine reads stacked and strided rows on both devices") {
  helm::test::TinyShape shape = shape_of("bf16");
  shape.devices = {"cpu", "accelerator", "cpu", "accelerator"};
  shape.accelerator_pages = 200;
  const TinyModel model = helm::test::tiny_model(shape);
  const helm::test::TinyFolder folder;
  const auto logits_of = [](helm::Engine& engine) {
    std::vector<float> last;
    engine.forward(engine.open(20), helm::test::token_ids(20, 3), helm::StepInput::Outputs::kLast,
                   [&](std::span<const float> row) { last.assign(row.begin(), row.end()); });
    return last;
  };
  helm::EngineOptions options;
  options.directory = folder.path();
  options.device = "sim";
  int64_t done = 0, total = 0;
  options.progress = [&](int64_t some, int64_t all) { done = some, total = all; };
  helm::Engine engine(Plan::from_json(split(model, folder.path(), "f32").dump()), options);
  CHECK(done == total);
  for (const helm::SliceSpec& slice : engine.plan().slices) total -= engine.plan().bytes(slice);
  CHECK(total == 0);
  const auto bound = helm::test::tiny_engine(model);
  CHECK(logits_of(engine) == logits_of(*bound));
}

TEST_CASE("an extent that leaves its file is refused by name") {
  const helm::test::TinyFolder folder;
  const TinyModel model = helm::test::tiny_model(shape_of("f32"));
  const json good = split(model, folder.path(), "f32");
  helm::EngineOptions options;
  options.directory = folder.path();
  for (const size_t extent : {0, 1, 2}) {
    json plan = good;
    int64_t offset = plan["tensors"][0]["source"]["extents"][extent]["offset"];
    plan["tensors"][0]["source"]["extents"][extent]["offset"] = offset + 1;
    try {
      helm::Engine engine(Plan::from_json(plan.dump()), options);
      FAIL("read beyond the end");
    } catch (const helm::Error& error) {
      const std::string message = error.what();
      CHECK(error.kind() == helm::ErrorKind::kIo);
      CHECK(message.find("embed." + std::to_string(extent) + " has ") != std::string::npos);
      CHECK(message.find("tensor \"embed\" ends at ") != std::string::npos);
    }
  }
}

TEST_CASE(
    "a format that the weights cannot become is refused by its name before anything is read") {
  for (const bool there : {false, true}) {
    helm::test::TinyShape shape = shape_of("f32");
    if (there) shape.devices = {"cpu", "cpu", "accelerator", "accelerator"};
    shape.accelerator_pages = there ? 200 : 0;
    const char* device = there ? "accelerator" : "cpu";
    const TinyModel model =
        helm::test::tiny_model(shape).with_slices(device, "format", "f32", "mx4.e32");
    json plan = json::parse(model.plan);
    for (json& slice : plan["slices"]) {  // vectors stay as they are
      for (const json& tensor : plan["tensors"]) {
        if (tensor["name"] == slice["tensor"] && tensor["shape"].size() == 1)
          slice["format"] = "f32";
      }
    }
    helm::EngineOptions options = model.options();
    options.device = "sim";
    options.progress = [](int64_t, int64_t) { FAIL("something was read"); };
    try {
      helm::Engine engine(Plan::from_json(plan.dump()), options);
      FAIL("HELM quantises to no such format");
    } catch (const helm::Error& error) {
      const std::string message = error.what();
      CHECK(error.kind() == helm::ErrorKind::kInvalid);
      CHECK(message.find("mx4.e32") != std::string::npos);
    }
  }
}
