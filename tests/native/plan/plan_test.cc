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
  CHECK(plan.units.size() == 4);
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
  expect(damaged("/kv/pages", uint64_t{1} << 63), "kv.pages");
  expect(damaged("/kv/dtype", "f64"), "unknown KV dtype \"f64\"; known: f32, f16, bf16, i8");
  expect(damaged("/rope/0/inv_freq/1", "x"), "rope[0].inv_freq[1]");
  expect(damaged("/tensors/0/shape", {1, 2, 3}), "tensors[0].shape");
  expect(damaged("/tensors/0/shape", {1, 2}), "embed");
  expect(damaged("/tensors/1/name", "embed"), "listed twice");
  expect(damaged("/values/0/width", 0), "values[0].width");
  expect(damaged("/values/0/rows", "all"), "values[0].rows");
  expect(damaged("/units/0/device", "cuda:0"), "cuda:0");
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

TEST_CASE("plans of other versions are refused with what to do") {
  json plan = json::parse(helm::test::tiny_model().plan);
  for (const int version : {0, 5, helm::Plan::kVersion + 1}) {
    plan["version"] = version;
    expect(plan, "version: this runtime executes version 6; make the plan anew");
  }
}

TEST_CASE("what is written for people is not read") {
  json plan = json::parse(helm::test::tiny_model().plan);
  plan["loading"] = "lazily";
  plan["units_cpu"] = {1, 2};
  CHECK(message_of(plan).empty());
}

TEST_CASE("units without logits, with two attention ops or nothing to visit with are refused") {
  const json good = json::parse(helm::test::tiny_model().plan);
  json plan = good;
  plan["units"] = json::array();
  expect(plan, "logits: must be written by the last unit");
  plan = good;
  plan["units"].erase(plan["units"].size() - 1);
  expect(plan, "logits: must be written by the last unit");
  plan = good;
  for (const json& op : good["units"][2]["ops"]) plan["units"][1]["ops"].push_back(op);
  plan["units"].erase(2);
  expect(plan, "units[1].ops: a unit has one attention op at most");

  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  shape.stream_tokens = 8;
  shape.stream_pages = 20;
  const json visiting = json::parse(helm::test::tiny_model(shape).plan);
  CHECK(message_of(visiting).empty());
  plan = visiting;
  const json attention = plan["units"][1]["ops"][3];
  REQUIRE(attention["op"] == "attention");
  plan["units"][1]["ops"] = {attention};
  expect(plan, "units[1]: visits the accelerator without tensors");
  plan = visiting;
  const json head = plan["units"][3]["ops"];
  plan["units"][2]["ops"].insert(plan["units"][2]["ops"].end(), head.begin(), head.end());
  plan["units"].erase(3);
  expect(plan, "units[2]: visits the accelerator as the last unit");
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
  CHECK(helm::Plan::from_json(plan.dump()).cpu_memory_bytes == helm::Plan::kUnlimited);
  plan.erase("memory");
  CHECK(helm::Plan::from_json(plan.dump()).cpu_memory_bytes == helm::Plan::kUnlimited);
  plan["memory"]["cpu"] = {{"weights_bytes", 1},       {"kv_bytes", 20},
                           {"activations_bytes", 300}, {"workspace_bytes", 4000},
                           {"staging_bytes", 50000},   {"reserve_bytes", 600000}};
  CHECK(helm::Plan::from_json(plan.dump()).cpu_memory_bytes == 654321);
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
