// Plans as hostile input: every damaged field is refused with its path.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "refused_plan.h"
#include "tiny_model.h"

namespace {

using helm::test::expect;
using helm::test::json;
using helm::test::message_of;

}  // namespace

TEST_CASE("a sound plan is accepted") {
  const helm::Plan plan = helm::Plan::from_json(helm::test::tiny_model().plan);
  CHECK(plan.units.size() == 6);
  CHECK(plan.units[0].kind == helm::UnitKind::kEmbedding);
  CHECK(plan.units[0].layer == helm::UnitSpec::kNoLayer);
  CHECK(plan.units[3].kind == helm::UnitKind::kAttention);
  CHECK(plan.units[3].layer == 1);
  CHECK(plan.units[4].kind == helm::UnitKind::kMlp);
  CHECK(plan.vocab_size == 61);
}

TEST_CASE("damaged fields are named") {
  const json good = json::parse(helm::test::tiny_model().plan);
  const auto damaged = [&](const char* pointer, const json& value) {
    json plan = good;
    plan[json::json_pointer(pointer)] = value;
    return plan;
  };
  expect(damaged("/format", "other"), "format");
  expect(damaged("/version", helm::Plan::kVersion - 1), "version");
  expect(damaged("/surprise", 1), "surprise");
  expect(damaged("/limits/context", 0), "limits.context");
  expect(damaged("/limits/step_tokens", 1e300), "limits.step_tokens");
  expect(damaged("/limits/sequences", 100), "limits.sequences");
  expect(damaged("/kv/page_tokens", -1), "kv.page_tokens");
  expect(damaged("/kv/blocks", uint64_t{1} << 63), "kv.blocks");
  expect(damaged("/kv/dtype", "f64"), "unknown KV dtype \"f64\"; known: f32, f16, bf16, i8");
  expect(damaged("/rope/0/inv_freq/1", "x"), "rope[0].inv_freq[1]");
  expect(damaged("/tensors/0/shape", {1, 2, 3}), "tensors[0].shape");
  expect(damaged("/tensors/0/shape", {1, 2}), "embed");
  expect(damaged("/tensors/1/name", "embed"), "listed twice");
  expect(damaged("/values/0/width", 0), "values[0].width");
  expect(damaged("/values/0/rows", "all"), "values[0].rows");
  expect(damaged("/units/0/device", "cuda:0"), "units[0].device: unknown device \"cuda:0\"");
  expect(damaged("/units/1/ops/0/op", "magic"), "units[1].ops[0].op");
  expect(damaged("/units/1/ops/0/eps", -1), "units[1].ops[0].eps");
  expect(damaged("/units/1/ops/0/groups", 2), "outside value");
  expect(damaged("/units/1/ops/1/out", "nowhere"), "units[1].ops[1].out");
  expect(damaged("/units/1/ops/1/out", "attn"), "units[1].ops[1]");
  expect(damaged("/units/1/ops/2/rotary", 4), "rotary");
  expect(damaged("/units/1/ops/3/heads", 3), "heads");
  expect(damaged("/units/1/ops/3/layer", 2), "layer");
  expect(damaged("/units/1/ops/3/scale", nullptr), "scale");
  expect(damaged("/logits", "x"), "logits");
}

TEST_CASE("damaged fields that may be absent are named") {
  helm::test::TinyShape shape;
  shape.varied = true;
  shape.softcap = 4;
  const json good = json::parse(helm::test::tiny_model(shape).plan);
  REQUIRE(message_of(good).empty());
  const auto damaged = [&](const char* pointer, const json& value) {
    json plan = good;
    plan[json::json_pointer(pointer)] = value;
    return plan;
  };
  expect(damaged("/units/0/ops/0/scale", "2"), "units[0].ops[0].scale");
  expect(damaged("/units/1/ops/0/weight_plus", nullptr), "units[1].ops[0].weight_plus");
  expect(damaged("/units/1/ops/0/accumulate", 1), "units[1].ops[0].accumulate");
  expect(damaged("/units/1/ops/2/pairs", "all"), "pairs: expected \"halves\" or \"neighbours\"");
  expect(damaged("/units/1/ops/3/softcap", 0), "units[1].ops[3].softcap: must be above 0");
  expect(damaged("/units/2/ops/2/factor", 2),
         "factor: only scale, softcap and swiglu_limit have a factor");
  expect(damaged("/units/2/ops/4/accumulate", "no"), "units[2].ops[4].accumulate");
  expect(damaged("/units/5/ops/2/factor", -1), "units[5].ops[2].factor: must be above 0");
  expect(damaged("/units/5/ops/2/kind", "tanh"), "relu, scale, softcap, swiglu_limit");
}

TEST_CASE("plans of other versions are refused with what to do") {
  json plan = json::parse(helm::test::tiny_model().plan);
  for (const int version : {0, 7, 13, helm::Plan::kVersion + 1}) {
    plan["version"] = version;
    expect(plan, "version: this runtime executes version 14; make the plan anew");
  }
}

TEST_CASE("damaged devices are named") {
  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  shape.accelerator_pages = 0;
  const json good = json::parse(helm::test::tiny_model(shape).plan);
  REQUIRE(message_of(good).empty());
  const auto damaged = [&](const char* pointer, const json& value) {
    json plan = good;
    plan[json::json_pointer(pointer)] = value;
    return plan;
  };
  const json own = {{"name", "cpu"}, {"kind", "cpu"}};
  const json other = {{"name", "accelerator"}, {"kind", "accelerator"}};
  expect(damaged("/devices", json::array()), "devices: expected the CPU");
  expect(damaged("/devices", json::object()), "devices: expected an array, found object");
  expect(damaged("/devices", json::array({other})),
         "devices[0].name: expected \"cpu\", found \"accelerator\"");
  expect(damaged("/devices", json::array({own})), "slices[");
  expect(damaged("/devices", json::array({own, own})), "devices[1].kind: expected \"accelerator\"");
  expect(damaged("/devices", json::array({own, other, other})),
         "devices[2].name: \"accelerator\" is listed twice");
  expect(damaged("/devices", json(17, other)), "devices: expected at most 16 devices");
  expect(damaged("/devices/0/name", "host"), "devices[0].name: expected \"cpu\", found \"host\"");
  expect(damaged("/devices/1/name", "cpu"), "devices[1].name: \"cpu\" is listed twice");
  expect(damaged("/devices/1/name", ""), "devices[1].name: expected a name");
  expect(damaged("/devices/1/name", 1), "devices[1].name: expected a string");
  expect(damaged("/devices/1/name", "gpu"), "unknown device \"accelerator\"");
  expect(damaged("/devices/1/kind", "cuda"), "devices[1].kind: expected \"accelerator\"");
  expect(damaged("/devices/1/bytes", 1), "devices[1]: unknown key \"bytes\"");
  expect(damaged("/memory/disk", good["memory"]["accelerator"]), "memory: unknown device \"disk\"");
  expect(damaged("/memory", json::object()), "memory: key \"accelerator\" is missing");
  expect(damaged("/memory/accelerator/kv_bytes", -1), "memory.accelerator.kv_bytes");
  expect(damaged("/schedule/pages/disk", 0), "schedule.pages: unknown device \"disk\"");
  expect(damaged("/schedule/pages/cpu", -1), "schedule.pages.cpu");
  expect(damaged("/schedule/pages/cpu", 3), "schedule.pages: the devices' pages do not add up");
}

TEST_CASE("text names devices, the plan numbers them") {
  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  json text = json::parse(helm::test::tiny_model(shape).plan);
  const json use = text["memory"]["accelerator"];
  text["memory"]["cpu"] = use;
  text["memory"]["cpu"]["kv_bytes"] = 5;
  text["memory"]["cpu"]["reserve_bytes"] = 7;
  text["memory"]["spare"] = use;
  text["schedule"]["pages"] = {{"cpu", 300}, {"accelerator", 99}, {"spare", 1}};
  text["devices"].push_back({{"name", "spare"}, {"kind", "accelerator"}});
  const helm::Plan plan = helm::Plan::from_json(text.dump());
  CHECK(plan.devices.size() == 3);
  CHECK(plan.devices[2].name == "spare");
  CHECK(plan.units[0].device == 1);
  CHECK(plan.units[1].device == helm::kCpu);
  CHECK(plan.pages == std::vector<int64_t>{300, 99, 1});
  const int64_t bytes = use["weights_bytes"];
  CHECK(plan.memory_bytes == std::vector<int64_t>{bytes + 12, bytes, bytes});
  CHECK(plan.uses(1));
  CHECK(!plan.uses(2));
  CHECK(plan.slice(0, helm::kCpu) == nullptr);
  CHECK(plan.slice(0, 1)->device == 1);

  const helm::Plan alone = helm::Plan::from_json(helm::test::tiny_model().plan);
  CHECK(alone.devices.size() == 1);
  CHECK(alone.pages == std::vector<int64_t>{400});
  CHECK(alone.memory_bytes == std::vector<int64_t>{helm::Plan::kUnlimited});
}

TEST_CASE("what is written for people is not read") {
  json plan = json::parse(helm::test::tiny_model().plan);
  plan["loading"] = "lazily";
  plan["units_cpu"] = {1, 2};
  CHECK(message_of(plan).empty());
}

TEST_CASE("units without logits, with two attention ops or without what visits are refused") {
  const json good = json::parse(helm::test::tiny_model().plan);
  json plan = good;
  plan["units"] = json::array();
  expect(plan, "kv.layers[0]: no attention op has this entry");
  plan = good;
  plan["units"][5]["ops"] = plan["units"][4]["ops"];
  expect(plan, "logits: must be written by the last unit");
  plan = good;
  for (const json& op : good["units"][3]["ops"]) plan["units"][1]["ops"].push_back(op);
  expect(plan, "units[1].ops: a unit of kind attention has one attention op at most, found 2");

  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  const json visiting = json::parse(helm::test::tiny_model(shape).plan);
  CHECK(message_of(visiting).empty());
  plan = visiting;
  const json attention = plan["units"][1]["ops"][3];
  REQUIRE(attention["op"] == "attention");
  plan["units"][1]["ops"] = {attention};
  plan["units"][2]["ops"] = json::array();
  expect(plan, "units[1]: visits the accelerator without tensors");
  // A layer visits as a whole, whatever part of it lies on the CPU.
  for (const char* place : {"cpu", "accelerator"}) {
    shape.devices = {"accelerator", "cpu", "accelerator", place, "cpu", "accelerator"};
    CHECK(message_of(json::parse(helm::test::tiny_model(shape).plan)).empty());
  }
  plan = json::parse(helm::test::tiny_model().plan);
  plan["schedule"] = visiting["schedule"];
  expect(plan, "schedule.prefill: there is no accelerator that layers could visit");
}

TEST_CASE("weights that visit units of the accelerator") {
  helm::test::TinyShape shape;
  shape.devices = {"cpu", "accelerator", "accelerator", "cpu"};
  shape.accelerator_pages = shape.pages;
  shape.visiting = {"block."};
  const json good = json::parse(helm::test::tiny_model(shape).plan);
  CHECK(message_of(good).empty());
  json plan = good;
  plan["schedule"]["visit_buffers"] = 1;
  expect(plan, "schedule.visit_buffers: expected an integer from 2 to 64");
  plan = good;
  plan["schedule"]["pages"] = {{"cpu", 1}, {"accelerator", shape.pages - 1}};
  expect(plan, "schedule.pages.accelerator: expected all pages, 400, of its KV entries where");
  plan = good;
  for (json& slice : plan["slices"]) {
    if (slice["tensor"] == "block.1.q") slice["device"] = "accelerator";
  }
  CHECK(message_of(plan).empty());
  plan["slices"].push_back(plan["slices"].back());
  plan["slices"].back()["tensor"] = "block.1.q";
  plan["slices"].back()["device"] = "cpu";
  expect(plan, "no op reads \"block.1.q\" on \"cpu\"");
  shape.visiting = {"norm"};
  plan = json::parse(helm::test::tiny_model(shape).plan);
  CHECK(message_of(plan).empty());
  shape.devices.back() = "accelerator";
  shape.visiting = {"embed", "norm"};
  expect(json::parse(helm::test::tiny_model(shape).plan),
         "units[5]: reads a tensor of which its device has no slice; only weights of layers visit");
  shape.devices[1] = "cpu";
  shape.accelerator_pages = shape.pages / 2;
  shape.visiting = {"block.1"};
  shape.visit_tokens = shape.visit_pages = 8;
  expect(json::parse(helm::test::tiny_model(shape).plan), "schedule.prefill: expected \"compute\"");
}

TEST_CASE("damaged kinds and layers of units are named") {
  const json good = json::parse(helm::test::tiny_model().plan);
  const auto damaged = [&](const char* pointer, const json& value) {
    json plan = good;
    plan[json::json_pointer(pointer)] = value;
    return plan;
  };
  expect(damaged("/units/1/kind", "block"), "units[1].kind: expected embedding, attention, mlp or");
  expect(damaged("/units/1/kind", 1), "units[1].kind: expected a string");
  expect(damaged("/units/1/kind", "mlp"),
         "units[1].ops: a unit of kind mlp has no attention op, found 1");
  expect(damaged("/units/0/layer", 0), "units[0].layer: expected null: the embedding is of no");
  expect(damaged("/units/5/layer", 2), "units[5].layer: expected null: the head is of no layer");
  expect(damaged("/units/1/layer", nullptr), "units[1].layer: expected the layer that this atten");
  expect(damaged("/units/2/layer", nullptr), "units[2].layer: expected the layer that this mlp is");
  expect(damaged("/units/2/layer", -1), "units[2].layer");
  expect(damaged("/units/2/layer", int64_t{1} << 40), "units[2].layer");
  expect(damaged("/units/2/layer", "0"), "units[2].layer: expected an integer");
  expect(damaged("/units/2/layer", 2),
         "units[3].layer: layer 1 comes after layer 2; layers ascend");
  expect(damaged("/units/3/layer", 0),
         "units[3].kind: the attention of layer 0 comes after its mlp");
  json plan = good;
  plan["units"].erase(0);
  expect(plan, "units[0].kind: the first unit is the embedding, and no other is");
  plan = good;
  plan["units"].erase(5);
  expect(plan, "units[4].kind: the last unit is of the head");
  plan = good;
  plan["units"].insert(plan["units"].begin() + 1, good["units"][0]);
  plan["units"][1]["name"] = "another";
  expect(plan, "units[1].kind: the first unit is the embedding, and no other is");
  // Numbers of layers may be left out.
  plan = good;
  plan["units"][3]["layer"] = plan["units"][4]["layer"] = plan["kv"]["layers"][1]["layer"] = 7;
  CHECK(message_of(plan).empty());
}

TEST_CASE("limits whose attention would need more than any address are refused") {
  json plan = json::parse(helm::test::tiny_model().plan);
  const int64_t many = int64_t{1} << 20;
  plan["kv"]["page_tokens"] = 1;
  plan["limits"] = {{"context", int64_t{1} << 31},
                    {"step_tokens", many},
                    {"step_outputs", many},
                    {"sequences", many}};
  expect(plan, "units[1].ops[3]: the partial results of 1048576 sequences");
}

TEST_CASE("what a plan may take of the host's memory is the sum of its purposes, or not said") {
  json plan = json::parse(helm::test::tiny_model().plan);
  CHECK(helm::Plan::from_json(plan.dump()).memory_bytes[helm::kCpu] == helm::Plan::kUnlimited);
  plan.erase("memory");
  CHECK(helm::Plan::from_json(plan.dump()).memory_bytes[helm::kCpu] == helm::Plan::kUnlimited);
  plan["memory"]["cpu"] = {{"weights_bytes", 1},       {"kv_bytes", 20},
                           {"activations_bytes", 300}, {"workspace_bytes", 4000},
                           {"staging_bytes", 50000},   {"reserve_bytes", 600000}};
  CHECK(helm::Plan::from_json(plan.dump()).memory_bytes[helm::kCpu] == 654321);
  const json good = plan;
  for (const auto& item : good["memory"]["cpu"].items()) {
    const std::string path = "memory.cpu." + item.key();
    for (const json& bad : {json(-1), json(1.5), json("1"), json(int64_t{1} << 62)}) {
      plan = good;
      plan["memory"]["cpu"][item.key()] = bad;
      expect(plan, path);
    }
    plan = good;
    plan["memory"]["cpu"].erase(item.key());
    expect(plan, "memory.cpu");
  }
}

TEST_CASE("what is nested more deeply than a stack is refused by its kind") {
  json plan = json::parse(helm::test::tiny_model().plan);
  plan["threads"] = "here";
  std::string text = plan.dump();
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  text.replace(text.find("\"here\""), 6, deep);
  CHECK_THROWS_WITH_AS(helm::Plan::from_json(text),
                       "[plan] threads: expected an integer, found array", helm::Error);
}

TEST_CASE("every removed key is refused") {
  const json good = json::parse(helm::test::tiny_model().plan);
  const json flat = good.flatten();
  for (const auto& item : flat.items()) {
    json plan = good;
    const json::json_pointer pointer(item.key());
    json& parent = plan[pointer.parent_pointer()];
    if (!parent.is_object() || pointer.back() == "memory") continue;  // for people, not for us
    parent.erase(pointer.back());
    CHECK_MESSAGE(!message_of(plan).empty(), "accepted without " << item.key());
  }
}

TEST_CASE("text that is not JSON is refused") {
  for (const char* text :
       {"", "{", "[1, 2", "\xff\xfe", "null", "[]", "{\"format\": \"helm-plan\"}"}) {
    CHECK_THROWS_AS(helm::Plan::from_json(text), helm::Error);
  }
  CHECK_THROWS_AS(helm::Plan::from_json(std::string(1000000, '[')), helm::Error);
}
