// Several units of one layer and kind, and the ops that put their results together: what is
// refused.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "refused_plan.h"
#include "tiny_model.h"

namespace {

using helm::test::expect;
using helm::test::json;
using helm::test::message_of;

helm::test::TinyShape shape() {
  helm::test::TinyShape shape;
  shape.head_dim = 16;
  shape.devices = {"cpu", "cpu", "cpu", "cpu"};
  shape.cuts = {{1, 32}, {1, 32, false}};
  shape.cut_rows = 30;
  return shape;
}

json cut() {
  return json::parse(helm::test::tiny_model(shape()).plan);
}

// Of the unit of that name; its index besides.
std::string at(const json& plan, const std::string& name) {
  for (size_t u = 0; u < plan["units"].size(); ++u) {
    if (plan["units"][u]["name"] == name) return "/units/" + std::to_string(u);
  }
  FAIL("no unit " << name);
  return "";
}

json changed(const json& plan, const std::string& pointer, const json& value) {
  json other = plan;
  other[json::json_pointer(pointer)] = value;
  return other;
}

}  // namespace

TEST_CASE("a cut plan is read: units in a row, parts of tensors, KV layers of some heads") {
  const helm::Plan plan = helm::Plan::from_json(cut().dump());
  CHECK(plan.units.size() == 1 + 2 * 8 + 4);
  CHECK(plan.units[1].name == "layer.0.attention.begin");
  CHECK(plan.units[4].layer == 0);
  CHECK(std::get<helm::AddOp>(plan.units[4].ops.at(0)).out == 0);
  CHECK(std::get<helm::ConcatOp>(plan.units.back().ops.at(0)).ins.size() == 2);
}

TEST_CASE("damaged sums and rows side by side are named") {
  const json good = cut();
  const std::string add = at(good, "layer.0.attention.end") + "/ops/0";
  const std::string said = "units[4].ops[0]";
  expect(changed(good, add + "/in", "nothing"), said + ".in: unknown value \"nothing\"");
  expect(changed(good, add + "/in", "x"), said + ".out: in and out must differ");
  expect(changed(good, add + "/in", "qkv[0:1]"), said + ".out: in and out differ in width");
  expect(changed(good, add + "/in", "partial_out"), said + ".out: mixes a per-token and a per-out");
  expect(changed(good, add + "/more", 1), said + ": unknown key \"more\"");
  const std::string concat = at(good, "head.end") + "/ops/0";
  const std::string there = "units[20].ops[0]";
  expect(changed(good, concat + "/in", json::array()), there + ".in: expected the values");
  expect(changed(good, concat + "/in", "x"), there + ".in: expected an array");
  expect(changed(good, concat + "/in/1", "logits"), there + ".in: in and out must differ");
  expect(changed(good, concat + "/in/1", "partial"), there + ".in: mixes a per-token and");
  expect(changed(good, concat + "/in/1", "logits_out[0:30]"),
         there + ".out: is 61 wide, what stands in it 60");
  expect(changed(good, concat + "/in/1", 7), there + ".in[1]: expected a string");
}

TEST_CASE("units out of their order, or named twice, are refused") {
  const json good = cut();
  expect(changed(good, "/units/2/name", "layer.0.attention.begin"),
         "units[2].name: \"layer.0.attention.begin\" is listed twice");
  json plan = good;  // an attention behind the mlp
  std::swap(plan["units"][4], plan["units"][5]);
  expect(plan, "units[5].kind: the attention of layer 0 comes after its mlp");
  plan = good;  // a head that others follow
  plan["units"].insert(plan["units"].begin() + 1, good["units"][17]);
  plan["units"].erase(18);
  expect(plan, "units[1].kind: only the last units are of the head");
  plan = good;  // the last head does not write logits
  plan["units"].erase(20);
  expect(plan, "logits: must be written by the last unit");
  for (int unit = 17; unit < 20; ++unit) plan["units"].erase(17);
  expect(plan, "units[16].kind: the last unit is of the head");
}

TEST_CASE("each KV layer has one attention op") {
  const json good = cut();
  json plan = good;
  const std::string guest = at(good, "layer.0.attention.guest"), said = "units[2].ops[2].layer";
  REQUIRE(good[json::json_pointer(guest + "/ops/2/op")] == "attention");
  expect(changed(good, guest + "/ops/2/layer", 2), said);
  plan = good;
  plan[json::json_pointer(guest)]["ops"].erase(2);
  expect(plan, "kv.layers[1]: no attention op has this entry");
}

TEST_CASE("a cut plan's steps do not overlap, and its KV lies where it is attended to") {
  const json good = cut();
  expect(changed(good, "/schedule/decode_groups", 2),
         "schedule.decode_groups: expected 1 where a layer or the head is cut, as at unit "
         "\"layer.0.attention.begin\"");
  expect(changed(good, "/schedule/prefill_overlap", true),
         "schedule.prefill_overlap: expected false where");
  json plan = good;
  plan["schedule"]["pages"]["cpu"] = good["schedule"]["pages"]["cpu"].get<int64_t>() + 1;
  plan["schedule"]["pages"]["accelerator"] =
      good["schedule"]["pages"]["accelerator"].get<int64_t>() - 1;
  expect(plan, "schedule.pages.accelerator: expected all pages, 400, of its KV entries where");
  // Parts that lie on one device are no cut.
  helm::test::TinyShape on_cpu = shape();
  on_cpu.cut_on_cpu = true;
  plan = json::parse(helm::test::tiny_model(on_cpu).plan);
  CHECK(message_of(plan).empty());
  plan["schedule"]["decode_groups"] = 2;
  CHECK(message_of(plan).empty());
}
