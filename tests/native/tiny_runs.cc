#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <utility>

#include "tiny_model.h"

namespace helm::test {

TinyFolder::TinyFolder() : path_(std::filesystem::temp_directory_path() / "helm-tiny-XXXXXX") {
  if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no temporary folder");
}

TinyFolder::~TinyFolder() {
  std::filesystem::remove_all(path_);
}

TinyModel TinyFolder::mapped(const TinyModel& model) const {
  nlohmann::json plan = nlohmann::json::parse(model.plan);
  for (nlohmann::json& slice : plan["slices"]) {
    if (slice["device"] == "cpu" && slice["format"] == "f32") slice["access"] = "mapped";
  }
  std::ofstream file(path_ + "/weights", std::ios::binary);
  for (nlohmann::json& tensor : plan["tensors"]) {
    tensor["source"] = {{"stored", "f32"},
                        {"extents", nlohmann::json::array({{{"file", "weights"},
                                                            {"offset", int64_t{file.tellp()}},
                                                            {"rows", tensor["shape"][0]},
                                                            {"row_stride", 0}}})}};
    const std::vector<float>& data = *model.tensors.at(tensor["name"]).data;
    file.write(reinterpret_cast<const char*>(data.data()),
               static_cast<std::streamsize>(data.size() * sizeof(float)));
  }
  return {plan.dump(), model.tensors};
}

TinyModel TinyFolder::on_disk(const TinyModel& model, int64_t ring_bytes, int64_t every) const {
  nlohmann::json plan = nlohmann::json::parse(mapped(model).plan);
  std::string read;  // the ops of those layers
  for (const nlohmann::json& unit : plan["units"]) {
    if (unit["layer"].is_number() && unit["layer"].get<int64_t>() % every == 0) {
      read += unit["ops"].dump();
    }
  }
  std::map<std::string, bool> matrices;
  for (const nlohmann::json& tensor : plan["tensors"]) {
    matrices[tensor["name"]] = tensor["shape"].size() == 2;
  }
  for (nlohmann::json& slice : plan["slices"]) {
    const std::string name = slice["tensor"];
    const bool there = slice["device"] == "cpu" && matrices[name] &&
                       read.find('"' + name + '"') != std::string::npos;
    slice["access"] = there ? "disk" : "resident";
  }
  plan["schedule"].emplace("prefill", "compute");
  plan["schedule"]["disk_ring_bytes"] = ring_bytes;
  return {plan.dump(), {}};
}

// Steps take less than any does, so that waits are told by the clock alone.
std::string step_times(const TinyShape& shape) {
  constexpr double kStep_s = 1e-6;
  nlohmann::json times = nlohmann::json::parse(R"({
    "rows": [1], "cpu_s": [0], "accelerator_s": [0], "accelerator_beside_s": [0], "head_s": [0],
    "attention": [{"window": 0, "layers": 1, "cpu_s": 0, "near_s": 0, "near_beside_s": 0,
                   "cpu_pair_s": [0], "pair_s": [0]}],
    "prompt_row_s": 0, "parts_s": 0, "near_part_s": 0, "ask_s": 0, "ask_row_s": 0, "answer_s": 0,
    "answer_row_s": 0, "block_to_host_s": 0, "block_to_accelerator_s": 0})");
  for (const char* far : {"far_s", "far_beside_s"}) {
    times["attention"][0][far] = kStep_s * shape.far_position_steps;
  }
  times["step_s"] = kStep_s;
  return times.dump();
}

std::unique_ptr<Engine> tiny_engine(const TinyModel& model, const std::string& device) {
  EngineOptions options = model.options();
  options.device = device;
  return std::make_unique<Engine>(Plan::from_json(model.plan), options);
}

std::vector<int32_t> token_ids(int64_t count, int32_t seed) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back((i * 37 + seed * 11 + i * i) % 61);
  return ids;
}

std::vector<float> logits_of(Engine& engine, const std::vector<int32_t>& ids, size_t chunk) {
  const SequenceId sequence = engine.open(static_cast<int64_t>(ids.size()));
  std::vector<float> last;
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const auto part = std::span(ids).subspan(begin, std::min(chunk, ids.size() - begin));
    engine.forward(sequence, part, StepInput::Outputs::kLast,
                   [&](std::span<const float> row) { last.assign(row.begin(), row.end()); });
  }
  engine.close(sequence);
  return last;
}

std::vector<std::vector<int32_t>> generated(Engine& engine, std::vector<Request> requests) {
  std::vector<std::vector<int32_t>> out(requests.size());
  Generation generation(engine, std::move(requests));
  while (!generation.done()) {
    for (const Token& token : generation.advance(0)) {
      out[static_cast<size_t>(token.request)].push_back(token.id);
    }
  }
  return out;
}

}  // namespace helm::test
