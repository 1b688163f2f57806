// What a plan says of its KV entries and of parts of tensors as hostile input: what does not cover
// a layer's heads or a tensor once is refused with its path.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "refused_plan.h"
#include "tiny_model.h"

namespace {

using helm::test::expect;
using helm::test::json;
using helm::test::message_of;

// Layer 0 has entries 0, of one KV head, and 1, of two; layer 1 has entry 2, of three.
json cut_plan() {
  helm::test::TinyShape shape{.inter = 72, .heads = 6, .kv_heads = 3, .head_dim = 16};
  shape.devices = {"cpu", "cpu", "accelerator", "cpu"};
  shape.cuts = {{1, 32}};
  shape.qkv_bias = true;
  return json::parse(helm::test::tiny_model(shape).plan);
}

json changed(const json& plan, const std::string& pointer, const json& value) {
  json other = plan;
  other[json::json_pointer(pointer)] = value;
  return other;
}

json entry(int64_t layer, int64_t kv_head, int64_t kv_heads) {
  return {{"layer", layer}, {"kv_head", kv_head}, {"kv_heads", kv_heads}};
}

// Where a tensor stands in the plan.
size_t index_of(const json& plan, const std::string& name) {
  for (size_t i = 0; i < plan["tensors"].size(); ++i) {
    if (plan["tensors"][i]["name"] == name) return i;
  }
  FAIL("no tensor " << name);
  return 0;
}

}  // namespace

TEST_CASE("entries of KV are read: pages in units of a head, wherever layers are cut") {
  const helm::Plan plan = helm::Plan::from_json(cut_plan().dump());
  const std::vector<helm::KvLayer> want = {{0, 0, 1}, {0, 1, 2}, {1, 0, 3}};
  CHECK(plan.kv.layers == want);
  CHECK(plan.kv.blocks == 200);
  CHECK(plan.kv.pages() == 600);
  CHECK(plan.kv.model_layers() == 2);
  CHECK(plan.kv.layer_number(1) == 0);
  CHECK(plan.kv.layer_number(2) == 1);
  const int64_t unit = 2 * 16 * 16 * 4;
  CHECK(plan.kv.unit_bytes() == unit);
  CHECK(plan.kv.page_bytes(1) == 2 * unit);
  CHECK(plan.kv.block_bytes() == 6 * unit);
}

TEST_CASE("entries of KV that do not cover each layer's heads in order are named") {
  const json good = cut_plan();
  REQUIRE(message_of(good).empty());
  REQUIRE(good["kv"]["layers"] == json::array({entry(0, 0, 1), entry(0, 1, 2), entry(1, 0, 3)}));
  const auto layers = [&](const json& list) { return changed(good, "/kv/layers", list); };
  expect(layers(2), "kv.layers: expected an array");
  expect(layers(json::array()), "kv.layers: expected an entry");
  expect(layers(json::array({2})), "kv.layers[0]");
  expect(changed(good, "/kv/layers/1/heads", 2), "kv.layers[1]: unknown key \"heads\"");
  for (const char* key : {"layer", "kv_head", "kv_heads"}) {
    const std::string field = std::string("/kv/layers/1/") + key;
    for (const json& value : {json(-1), json(uint64_t{1} << 63), json("1"), json(1.5), json()}) {
      expect(changed(good, field, value), std::string("kv.layers[1].") + key);
    }
  }
  expect(changed(good, "/kv/layers/1/kv_heads", 0), "kv.layers[1].kv_heads");
  expect(changed(good, "/kv/layers/1/kv_heads", 4), "kv.layers[1].kv_heads");
  expect(changed(good, "/kv/layers/1/kv_head", 3), "kv.layers[1].kv_head");
  expect(changed(good, "/kv/layers/1/kv_head", 2),
         "kv.layers[1].kv_head: KV heads from 1 on of layer 0 lie in no entry");
  expect(changed(good, "/kv/layers/1/kv_head", 0),
         "kv.layers[1].kv_head: KV heads from 0 on of layer 0 lie in two entries");
  expect(layers({entry(0, 0, 1), entry(0, 1, 1), entry(1, 0, 3)}),
         "kv.layers[1].kv_heads: KV heads from 2 on of layer 0 lie in no entry");
  expect(layers({entry(0, 0, 2), entry(0, 2, 2), entry(1, 0, 3)}),
         "kv.layers[1].kv_heads: the entries of layer 0 have 4 KV heads, the model 3");
  expect(layers({entry(0, 1, 2), entry(0, 0, 1), entry(1, 0, 3)}), "kv.layers[0].kv_head");
  expect(layers({entry(1, 0, 3), entry(0, 0, 1), entry(0, 1, 2)}),
         "kv.layers[1].layer: layer 0 comes after layer 1; layers ascend");
  expect(layers({entry(0, 0, 1), entry(0, 1, 2), entry(1, 0, 1)}),
         "kv.layers[2].kv_heads: KV heads from 1 on of layer 1 lie in no entry");
}

TEST_CASE("each entry of KV has one attention op, of its layer and heads") {
  const json good = cut_plan();
  // units[2] is the guest of layer 0, units[3] its home; their third op is the attention.
  const std::string guest = "/units/2/ops/2", home = "/units/3/ops/2";
  REQUIRE(good[json::json_pointer(guest + "/op")] == "attention");
  REQUIRE(good[json::json_pointer(home + "/layer")] == 0);
  expect(changed(good, guest + "/layer", 3), "units[2].ops[2].layer");
  expect(changed(good, guest + "/layer", 0), "units[2].ops[2].kv_heads");
  expect(changed(good, guest + "/kv_heads", 3), "units[2].ops[2].kv_heads");
  json plan =
      changed(good, "/kv/layers",
              json::array({entry(0, 0, 1), entry(0, 1, 1), entry(0, 2, 1), entry(1, 0, 3)}));
  expect(plan, "units[2].ops[2].kv_heads");
  plan = changed(good, guest + "/layer", 2);
  plan[json::json_pointer(guest + "/kv_heads")] = 3;
  expect(plan, "units[2].ops[2]");
  plan = changed(good, "/kv/layers/2/layer", 7);
  expect(plan, "layer: KV entry 2 is of layer 7, the unit of layer 1");
  plan = changed(good, "/kv/layers",
                 json::array({entry(0, 0, 1), entry(0, 1, 2), entry(1, 0, 3), entry(2, 0, 3)}));
  expect(plan, "kv.layers[3]: no attention op has this entry");
  plan = good;  // two of one entry
  plan["units"].insert(plan["units"].begin() + 4, good["units"][3]);
  plan["units"][4]["name"] = "another";
  expect(plan, "units[4].ops[2].layer: KV entry 0 has two attention ops");
}

TEST_CASE("pages of KV beyond 64 TiB, or beyond what tables of pages count, are refused") {
  const json good = cut_plan();
  expect(changed(good, "/kv/blocks", int64_t{1} << 31), "kv.blocks");
  expect(changed(good, "/kv/blocks", int64_t{1} << 28), "kv.blocks: 805306368 pages of 3 KV");
  json plan = changed(good, "/kv/page_tokens", 1 << 20);
  plan["kv"]["blocks"] = int64_t{1} << 20;
  expect(plan, "kv: the pages exceed 64 TiB");
  plan = changed(good, "/schedule/prefill", "visit");
  plan["schedule"]["visit_tokens"] = 8;
  plan["schedule"]["visit_pages"] = int64_t{1} << 31;
  expect(plan, "schedule.visit_pages: 2147483648 pages of 3 KV heads are more than 2147483647");
}

TEST_CASE("parts that leave their tensor, or are cut where no format is, are named") {
  const json good = cut_plan();
  const std::string q0 = "block.0.q[0:32, 0:24]", o1 = "block.0.o[0:24, 32:96]";
  const size_t q = index_of(good, q0), o = index_of(good, o1);
  const size_t bias = index_of(good, "block.0.q_bias[0:32]");
  const auto at = [](size_t i) { return "/tensors/" + std::to_string(i); };
  const auto said = [](size_t i, const char* field) {
    return "tensors[" + std::to_string(i) + "]." + field;
  };
  const auto part = [&](size_t i, const char* field, const json& value) {
    return changed(good, at(i) + "/part/" + field, value);
  };
  expect(changed(good, at(q) + "/part", 3), said(q, "part"));
  expect(part(q, "rows", 1), said(q, "part: unknown key \"rows\""));
  expect(part(q, "tensor", 1), said(q, "part.tensor"));
  expect(part(q, "shape", {96}), said(q, "part.shape: expected as many dimensions"));
  expect(part(q, "shape", {96, 0}), said(q, "part.shape[1]"));
  expect(part(q, "shape", {96, 24, 1}), said(q, "part.shape"));
  expect(part(q, "shape", {int64_t{1} << 31, 1 << 24}), said(q, "part.shape"));
  expect(part(q, "shape", {31, 24}), said(q, "part.row: the part ends at row 32"));
  expect(part(q, "row", -1), said(q, "part.row"));
  expect(part(q, "row", 65), said(q, "part.row: the part ends at row 97, \"block.0.q\" at 96"));
  expect(part(q, "col", 32), said(q, "part.col: the part ends at column 56"));
  expect(part(q, "row", 32), said(q, "name: expected \"block.0.q[32:64, 0:24]\""));
  expect(part(o, "col", 8),
         said(o, "part.col: columns of \"block.0.o\" are cut at multiples of 32"));
  expect(changed(good, at(o) + "/shape", {24, 63}),
         said(o, "shape: columns of \"block.0.o\" are cut at multiples of 32, not at 95"));
  expect(part(bias, "col", 1), said(bias, "part.col: expected 0"));
  const json stored = {
      {"stored", "ggml.q4_0"},
      {"extents", {{{"file", "a"}, {"offset", 0}, {"rows", 24}, {"row_stride", 0}}}}};
  expect(changed(good, at(o) + "/source", stored),
         said(o,
              "part.col: columns of \"block.0.o\" are cut "
              "at multiples of 256"));
  expect(changed(good, at(o) + "/source", {{"stored", "f32"}, {"extents", json::array()}}),
         said(o, "source.extents: the rows add up to 0"));
}

TEST_CASE("parts cover their tensor once, and are of one shape and source") {
  const json good = cut_plan();
  const size_t q0 = index_of(good, "block.0.q[0:32, 0:24]");
  const size_t q1 = index_of(good, "block.0.q[32:96, 0:24]");
  const std::string first = "tensors[" + std::to_string(std::min(q0, q1)) + "].part: ";
  // Renamed wherever it is named.
  const auto resized = [&](const std::string& from, const std::string& to, int64_t row,
                           int64_t rows) {
    std::string text = good.dump();
    for (size_t i = text.find(from); i != std::string::npos; i = text.find(from, i + 1)) {
      text.replace(i, from.size(), to);
    }
    json plan = json::parse(text);
    json& tensor = plan["tensors"][index_of(plan, to)];
    tensor["shape"][0] = rows;
    tensor["part"]["row"] = row;
    return plan;
  };
  expect(resized("block.0.q[32:96, 0:24]", "block.0.q[33:96, 0:24]", 33, 63),
         first + "rows 32 to 33, columns 0 to 24, of \"block.0.q\" lie in no part");
  expect(resized("block.0.q[32:96, 0:24]", "block.0.q[31:96, 0:24]", 31, 65),
         first + "rows 31 to 32, columns 0 to 24, of \"block.0.q\" lie in two parts");
  expect(changed(good, "/tensors/" + std::to_string(q1) + "/part/shape", {97, 24}),
         "tensors[" + std::to_string(std::max(q0, q1)) + "].part: another part of \"block.0.q\"");
  const json source = {
      {"stored", "f32"},
      {"extents", {{{"file", "a"}, {"offset", 0}, {"rows", 96}, {"row_stride", 0}}}}};
  expect(changed(good, "/tensors/" + std::to_string(q1) + "/source", source),
         "another part of \"block.0.q\" has another shape or source");
}

TEST_CASE("only whole rows of a part are mapped") {
  json plan = cut_plan();
  for (json& slice : plan["slices"]) {
    const std::string name = slice["tensor"];
    if (slice["device"] == "cpu" && name == "block.0.q[0:32, 0:24]") slice["access"] = "mapped";
  }
  CHECK(message_of(plan).empty());
  for (json& slice : plan["slices"]) {
    const std::string name = slice["tensor"];
    if (slice["device"] == "cpu" && name == "block.0.o[0:24, 0:32]") slice["access"] = "mapped";
  }
  expect(plan, "access: \"block.0.o[0:24, 0:32]\" has some columns of its rows");
}
