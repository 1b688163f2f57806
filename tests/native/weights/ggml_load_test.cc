// The loader of weights that GGML's blocks store: in their packed formats, and converted to dense
// ones; rows that lie apart in the file. What is loaded is compared with encoding in memory.
#include <doctest/doctest.h>

#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/stage.h"
#include "helm/encode.h"
#include "helm/stored.h"
#include "support/check.h"
#include "support/host_memory.h"
#include "tiny_model.h"
#include "weights/store.h"

namespace {

using helm::Format;
using helm::Plan;
using helm::Stored;
using helm::test::TinyModel;
using nlohmann::json;

using Bytes = std::vector<std::byte>;

// The second byte of each pair keeps a small exponent, so that whatever is a scale is finite and
// weights are small.
Bytes random_blocks(Stored stored, int64_t bytes, uint32_t seed) {
  const unsigned mask = stored == Stored::kMXFP4 ? 0x83 : 0xa3;  // exponents up to 131
  std::mt19937 rng(seed);
  Bytes blocks(static_cast<size_t>(bytes));
  for (std::byte& byte : blocks) byte = std::byte(rng() & mask);
  return blocks;
}

helm::test::TinyShape wide_shape() {
  helm::test::TinyShape shape;
  shape.hidden = 256;
  shape.inter = 512;
  shape.layers = 1;
  shape.head_dim = 64;
  shape.threads = 3;
  return shape;
}

// A model whose matrices are stored in blocks: first the even rows of the file, then the odd ones.
struct BlockModel {
  BlockModel(const std::string& folder, Stored stored, const char* format) : stored_as(stored) {
    model = helm::test::tiny_model(wide_shape());
    json plan = json::parse(model.plan);
    for (json& tensor : plan["tensors"]) {
      const std::string name = tensor["name"];
      if (tensor["shape"].size() == 1) {
        store_vector(folder, tensor);
      } else {
        store_matrix(folder, tensor);
      }
      for (json& slice : plan["slices"]) {
        if (slice["tensor"] == name && tensor["shape"].size() == 2) slice["format"] = format;
      }
    }
    model.plan = plan.dump();
  }

  void store_vector(const std::string& folder, json& tensor) const {
    const std::string name = tensor["name"];
    const std::vector<float>& data = *model.tensors.at(name).data;
    std::ofstream(folder + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(data.data()),
               static_cast<std::streamsize>(data.size() * sizeof(float)));
    tensor["source"] = {
        {"stored", "f32"},
        {"extents",
         json::array({{{"file", name}, {"offset", 0}, {"rows", data.size()}, {"row_stride", 0}}})}};
  }

  // HELM's own formats lie in one piece.
  void store_strips(const std::string& folder, json& tensor) {
    const std::string name = tensor["name"];
    const std::vector<float>& data = *model.tensors.at(name).data;
    helm::StoredWeights weights;
    weights.name = name;
    weights.stored = "f32";
    weights.rows = tensor["shape"][0];
    weights.cols = tensor["shape"][1];
    weights.pieces["weight"] = {
        "u8", {weights.rows, weights.cols * 4}, std::as_bytes(std::span(data))};
    const helm::Format& format = helm::row_of(stored_as).exact;
    Bytes& own = sorted[name];
    own.resize(static_cast<size_t>(helm::format_bytes(format, weights.rows, weights.cols)));
    helm::encode_weights(weights, format, own);
    std::ofstream out(folder + "/" + name, std::ios::binary);
    out << std::string(64, '.');
    out.write(reinterpret_cast<const char*>(own.data()), static_cast<std::streamsize>(own.size()));
    const json extent = {{"file", name}, {"offset", 64}, {"rows", weights.rows}, {"row_stride", 0}};
    tensor["source"] = {{"stored", helm::stored_name(stored_as)},
                        {"extents", json::array({extent})}};
  }

  void store_matrix(const std::string& folder, json& tensor) {
    if (helm::is_packed(stored_as)) return store_strips(folder, tensor);
    const std::string name = tensor["name"];
    const int64_t rows = tensor["shape"][0], cols = tensor["shape"][1];
    const int64_t size = helm::stored_bytes(stored_as, cols), even = (rows + 1) / 2;
    const Bytes file =
        random_blocks(stored_as, rows * size, static_cast<uint32_t>(name.size() + 1));
    std::ofstream out(folder + "/" + name, std::ios::binary);
    out << "12345";  // files align nothing
    out.write(reinterpret_cast<const char*>(file.data()),
              static_cast<std::streamsize>(file.size()));
    Bytes& own = sorted[name];
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = row < even ? 2 * row : 2 * (row - even) + 1;
      own.insert(own.end(), file.begin() + from * size, file.begin() + (from + 1) * size);
    }
    json extents = json::array();
    const int64_t counts[] = {even, rows - even};
    for (int64_t i = 0; i < 2; ++i) {
      extents.push_back({{"file", name},
                         {"offset", 5 + i * size},
                         {"rows", counts[i]},
                         {"row_stride", 2 * size}});
    }
    tensor["source"] = {{"stored", helm::stored_name(stored_as)}, {"extents", extents}};
  }

  helm::StoredWeights weights(const helm::TensorSpec& spec) const {
    helm::StoredWeights weights;
    weights.name = spec.name;
    weights.stored = helm::stored_name(stored_as);
    weights.rows = spec.rows();
    weights.cols = spec.cols();
    const int64_t size = helm::stored_bytes(stored_as, spec.cols());
    const int64_t unit = helm::is_packed(stored_as) ? helm::kStripRows : 1;
    const int64_t units = helm::stored_rows(stored_as, spec.rows()) / unit;
    weights.pieces["weight"] = {"u8", {units, size * unit}, sorted.at(spec.name)};
    return weights;
  }

  Stored stored_as;
  TinyModel model;
  std::map<std::string, Bytes> sorted;  // rows in the order of the tensor
};

std::vector<float> logits(helm::Engine& engine) {
  std::vector<float> last;
  engine.forward(engine.open(20), helm::test::token_ids(20, 3), helm::StepInput::Outputs::kLast,
                 [&](std::span<const float> row) { last.assign(row.begin(), row.end()); });
  return last;
}

}  // namespace

TEST_CASE("loaded blocks are those that are encoded in memory, in packed and in dense formats") {
  const size_t step = helm::test::kFew ? 3 : 1;
  for (size_t i = static_cast<size_t>(Stored::kBF16) + 1; i < std::size(helm::kStoredRows);
       i += step) {
    const auto stored = static_cast<Stored>(i);
    if (helm::is_pieces(stored)) continue;
    for (const char* format : helm::test::sampled(
             {format_name(helm::row_of(stored).exact), "bf16", "c8.s32", "c4.km32"})) {
      CAPTURE(std::string(helm::stored_name(stored)));
      CAPTURE(std::string(format));
      const helm::test::TinyFolder folder;
      const BlockModel made(folder.path(), stored, format);
      const Plan plan = Plan::from_json(made.model.plan);
      helm::EngineOptions options;
      options.directory = folder.path();
      helm::ThreadPool threads(3);
      helm::test::HostMemory host(threads);
      const helm::Weights weights(plan, options, *helm::cpu::kernels_scalar(), threads,
                                  host.account, nullptr);
      int matrices = 0;
      for (const helm::SliceSpec& slice : plan.slices) {
        const helm::TensorSpec& spec = plan.tensors[static_cast<size_t>(slice.tensor)];
        if (!spec.is_matrix()) continue;
        Bytes want(static_cast<size_t>(plan.bytes(slice)));
        helm::encode_weights(made.weights(spec), slice.format, want);
        const helm::Weight& got = weights.on(helm::kCpu)[static_cast<size_t>(slice.tensor)];
        CHECK_MESSAGE(
            std::memcmp(helm::cpu::host_pointer(got.address), want.data(), want.size()) == 0,
            spec.name);
        ++matrices;
      }
      CHECK(matrices >= 8);
    }
  }
}

TEST_CASE("matrices in HELM's own formats are read where their files are mapped") {
  for (const Stored stored : {Stored::kC8S32, Stored::kC4KM32}) {
    const helm::test::TinyFolder folder;
    const char* format = format_name(helm::row_of(stored).exact);
    const BlockModel made(folder.path(), stored, format);
    json plan = json::parse(made.model.plan);
    for (json& slice : plan["slices"]) {
      if (slice["format"] == format) slice["access"] = "mapped";
    }
    plan["loading"] = "mapped";
    helm::EngineOptions options;
    options.directory = folder.path();
    helm::Engine copied(Plan::from_json(made.model.plan), options);
    helm::Engine mapped(Plan::from_json(plan.dump()), options);
    CHECK(mapped.stats().copied_bytes < copied.stats().copied_bytes);
    CHECK(logits(mapped) == logits(copied));
  }
}

TEST_CASE("an engine of blocks as bf16 gives the logits of their values as bf16") {
  for (const Stored stored : {Stored::kQ4_1, Stored::kQ6_K}) {
    const helm::test::TinyFolder folder;
    BlockModel made(folder.path(), stored, "bf16");
    const Plan plan = Plan::from_json(made.model.plan);
    for (const helm::TensorSpec& spec : plan.tensors) {
      if (!spec.is_matrix()) continue;
      auto values =
          std::make_shared<std::vector<float>>(static_cast<size_t>(spec.rows() * spec.cols()));
      helm::read_weights(made.weights(spec), *values);
      made.model.tensors.at(spec.name).data = values;
    }
    helm::EngineOptions options;
    options.directory = folder.path();
    helm::Engine loaded(Plan::from_json(made.model.plan), options);
    const auto bound = helm::test::tiny_engine(made.model);
    const std::vector<float> want = logits(*bound);
    CHECK(want.front() - want.front() == 0);
    CHECK(helm::test::compare_bits(logits(loaded), want, helm::stored_name(stored)) == "");
  }
}

TEST_CASE("a block with an infinite scale ends the load, which names tensor and row") {
  const helm::test::TinyFolder folder;
  const BlockModel made(folder.path(), Stored::kQ8_0, "c8.s32");
  const Plan plan = Plan::from_json(made.model.plan);
  const helm::TensorSpec& spec = plan.tensors[0];
  const int64_t size = helm::stored_bytes(Stored::kQ8_0, spec.cols());
  {
    std::fstream file(folder.path() + "/" + spec.name,
                      std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(5 + 2 * 20 * size + 1);  // row 20 is row 40 of the file
    file.put('\x7c');
  }
  helm::EngineOptions options;
  options.directory = folder.path();
  helm::ThreadPool threads(3);
  try {
    helm::test::HostMemory host(threads);
    const helm::Weights weights(plan, options, *helm::cpu::kernels_scalar(), threads, host.account,
                                nullptr);
    FAIL("an infinite scale was taken");
  } catch (const helm::Error& error) {
    const std::string message = error.what();
    CHECK(error.kind() == helm::ErrorKind::kIo);
    CHECK(message.find("tensor \"" + spec.name + "\" has a scale") != std::string::npos);
    CHECK(message.find("in row 20, columns 0 to 255") != std::string::npos);
  }
}

TEST_CASE("a format that does not hold what is stored is refused in the plan") {
  const helm::test::TinyFolder folder;
  const BlockModel made(folder.path(), Stored::kQ4_K, "c4.m32");
  try {
    Plan::from_json(made.model.plan);
    FAIL("Q4_K is no c4.m32");
  } catch (const helm::Error& error) {
    CHECK(std::string(error.what())
              .find("is stored as ggml.q4_k, which c4.m32 does not hold; "
                    "expected c4.km32, f32, ") != std::string::npos);
  }
}
