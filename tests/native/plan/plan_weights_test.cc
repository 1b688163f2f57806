// What a plan says of tensors, sources and slices as hostile input: damaged fields are refused with
// their path, and formats with what they cannot become.
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

namespace {

// A plan whose tensor 0, a matrix [61, 24], lies in rows of two files.
json stored_plan() {
  json plan = json::parse(helm::test::tiny_model().plan);
  plan["tensors"][0]["source"] = {
      {"stored", "bf16"},
      {"extents",
       json::array({{{"file", "a"}, {"offset", 64}, {"rows", 40}, {"row_stride", 0}},
                    {{"file", "b/c"}, {"offset", 0}, {"rows", 21}, {"row_stride", 100}}})}};
  return plan;
}

}  // namespace

TEST_CASE("damaged sources are named") {
  const json good = stored_plan();
  REQUIRE(message_of(good).empty());
  const auto damaged = [&](const std::string& path, const json& value) {
    json plan = good;
    plan[json::json_pointer("/tensors/0/source" + path)] = value;
    return plan;
  };
  const std::string source = "tensors[0].source";
  expect(damaged("", 1), source);
  expect(damaged("/file", "x"), "file");  // of older plans
  expect(damaged("/stored", "f64"), source + ".stored: unknown encoding \"f64\" of weights; known");
  expect(damaged("/stored", 16), source + ".stored");
  expect(damaged("/extents", json::array()), source + ".extents: the rows add up to 0");
  expect(damaged("/extents", "a"), source + ".extents");
  expect(damaged("/extents/0/surprise", 1), "surprise");
  for (const char* file : {"../x", "/x", "", "x/../../y", "x/.."}) {
    expect(damaged("/extents/1/file", file), source + ".extents[1].file");
  }
  expect(damaged("/extents/0/file", 1), source + ".extents[0].file");
  expect(damaged("/extents/0/offset", -1), source + ".extents[0].offset");
  expect(damaged("/extents/0/offset", int64_t{1} << 62), source + ".extents[0].offset");
  expect(damaged("/extents/0/offset", "0"), source + ".extents[0].offset");
  expect(damaged("/extents/0/rows", 0), source + ".extents[0].rows");
  expect(damaged("/extents/0/rows", 39), source + ".extents: the rows add up to 60");
  expect(damaged("/extents/0/rows", 41), source + ".extents: the rows add up to 62");
  expect(damaged("/extents/0/rows", uint64_t{1} << 63), source + ".extents[0].rows");
  expect(damaged("/extents/1/row_stride", -1), source + ".extents[1].row_stride");
  expect(damaged("/extents/1/row_stride", 47), source + ".extents[1].row_stride: rows of 48 bytes");
  expect(damaged("/extents/1/row_stride", 1.5), source + ".extents[1].row_stride");
  expect(damaged("/extents/1/row_stride", int64_t{1} << 45), source + ".extents[1]: ends beyond");
  for (const char* key : {"stored", "extents"}) {
    json plan = good;
    plan["tensors"][0]["source"].erase(key);
    expect(plan, key);
  }
  for (const char* key : {"file", "offset", "rows", "row_stride"}) {
    json plan = good;
    plan["tensors"][0]["source"]["extents"][1].erase(key);
    expect(plan, key);
  }
  json plan = good;  // a vector has rows of one element
  REQUIRE(plan["tensors"][1]["shape"].size() == 2);
  size_t vector = 0;
  while (plan["tensors"][vector]["shape"].size() == 2) ++vector;
  plan["tensors"][vector]["source"] = {
      {"stored", "f16"},
      {"extents", json::array({{{"file", "a"}, {"offset", 0}, {"rows", 4}, {"row_stride", 4}},
                               {{"file", "a"}, {"offset", 2}, {"rows", 20}, {"row_stride", 4}}})}};
  CHECK(message_of(plan).empty());
  plan["tensors"][vector]["source"]["extents"][0]["row_stride"] = 1;
  expect(plan, "row_stride: rows of 2 bytes overlap");

  // HELM's own formats hold matrices, each in one piece.
  expect(damaged("/stored", "c8.s32"), source + ".extents: a matrix of c8.s32 lies in one piece");
  expect(damaged("/stored", "c8.r"), source + ".stored: unknown encoding \"c8.r\"");
  plan["tensors"][vector]["source"]["stored"] = "c4.km32";
  expect(plan, ".stored: vectors are not stored as c4.km32");
}

TEST_CASE("damaged slices are named") {
  helm::test::TinyShape shape;
  shape.weight_dtype = "bf16";
  shape.devices = {"cpu", "cpu", "accelerator", "accelerator"};
  json good = json::parse(helm::test::tiny_model(shape).plan);
  REQUIRE(message_of(good).empty());
  const auto index_of = [&](const char* device, size_t dimensions) {
    for (size_t i = 0;; ++i) {
      const json& slice = good["slices"].at(i);
      for (const json& tensor : good["tensors"]) {
        if (tensor["name"] != slice["tensor"] || slice["device"] != device) continue;
        if (tensor["shape"].size() == dimensions) return i;
      }
    }
  };
  const size_t here = index_of("cpu", 2), there = index_of("accelerator", 2);
  const size_t vector = index_of("cpu", 1);
  const auto damaged = [&](size_t slice, const char* key, const json& value) {
    json plan = good;
    plan["slices"][slice][key] = value;
    return plan;
  };
  const auto at = [](size_t slice, const char* rest) {
    return "slices[" + std::to_string(slice) + "]" + rest;
  };
  expect(damaged(here, "surprise", 1), "surprise");
  expect(damaged(here, "tensor", "nothing"), at(here, ".tensor"));
  expect(damaged(here, "tensor", 0), at(here, ".tensor"));
  expect(damaged(here, "device", "cuda:0"), at(here, ".device: unknown device \"cuda:0\""));
  expect(damaged(here, "format", "int3"), at(here, ".format: [format] no format"));
  expect(damaged(here, "format", 4), at(here, ".format"));
  expect(damaged(vector, "format", "f16"), at(vector, ".format: vectors are held as f32"));
  expect(damaged(vector, "format", "c8.s32"), at(vector, ".format: vectors are held as f32"));
  expect(damaged(there, "format", "bf16c"), at(there, ".format: bf16c is a format of the CPU"));
  expect(damaged(here, "access", "tape"), at(here, ".access: expected \"resident\","));
  expect(damaged(here, "access", "disk"), at(here, ".access: \"embed\" is bound from memory"));
  expect(damaged(here, "access", true), at(here, ".access"));
  expect(damaged(there, "access", "mapped"), at(there, ".access: only the CPU"));
  expect(damaged(there, "device", "cpu"), "slices");
  CHECK(message_of(damaged(here, "format", "bf16c")).empty());
  CHECK(message_of(damaged(here, "access", "mapped")).empty());  // bound by the caller

  json plan = good;
  plan["slices"].push_back(plan["slices"][here]);
  expect(plan, at(plan["slices"].size() - 1, ": \"embed\" on \"cpu\" is listed twice"));
  plan = good;
  plan["slices"].erase(there);  // of the head, what the CPU holds for the embedding
  expect(plan, "only weights of layers visit it");
  plan["slices"].erase(here);
  expect(plan, "slices: an op reads ");
  plan = good;
  plan["tensors"].push_back(plan["tensors"][0]);
  plan["tensors"].back()["name"] = "idle";
  CHECK(message_of(plan).empty());  // a tensor that no op reads has no slice
  plan["slices"].push_back(plan["slices"][here]);
  plan["slices"].back()["tensor"] = "idle";
  expect(plan, at(plan["slices"].size() - 1, ": no op reads \"idle\" on \"cpu\""));
  plan = good;
  plan.erase("slices");
  expect(plan, "slices");

  plan = good;  // too wide for the columns of escapes
  plan["tensors"].push_back(
      {{"name", "wide"}, {"shape", {24, 65537}}, {"source", nullptr}, {"part", nullptr}});
  plan["slices"].push_back(
      {{"tensor", "wide"}, {"device", "cpu"}, {"format", "bf16c"}, {"access", "resident"}});
  expect(plan, at(plan["slices"].size() - 1, ".format: no bf16c has 65537 columns"));
}

TEST_CASE("damaged pieces are named") {
  json good = stored_plan();
  const auto piece = [](const char* name, const char* dtype, const json& shape) {
    return json{{"name", name}, {"dtype", dtype}, {"shape", shape}, {"file", "a"}, {"offset", 3}};
  };
  good["tensors"][0]["source"] = {
      {"stored", "gptq4"},
      {"extents", json::array()},
      {"aux", json::array({piece("qweight", "i32", {3, 61}), piece("scales", "f16", {1, 61}),
                           piece("one", "f32", json::array())})}};
  REQUIRE(good["slices"][0]["tensor"] == "embed");
  for (const char* format : {"f32", "bf16", "bf16c", "c8.s32", "c4.z32", "c4.s128"}) {
    good["slices"][0]["format"] = format;
    CHECK(message_of(good).empty());  // which of them is told by what lies in the files
  }
  const auto damaged = [&](const std::string& path, const json& value) {
    json plan = good;
    plan[json::json_pointer("/tensors/0/source" + path)] = value;
    return plan;
  };
  const std::string source = "tensors[0].source", first = source + ".aux[0]";
  expect(damaged("/aux", json::array()), source + ".aux: expected 1 to 8 pieces");
  expect(damaged("/aux", 3), source + ".aux");
  expect(damaged("/stored", "bf16"), source + ".aux: bf16 has no pieces");
  expect(damaged("/stored", "c4.km32"), source + ".aux: c4.km32 has no pieces");
  expect(damaged("/extents", json::array({1})), source + ".extents: expected none beside pieces");
  expect(damaged("/aux/1/name", "qweight"), source + ".aux: qweight is listed twice");
  expect(damaged("/aux/0/name", 1), first + ".name");
  expect(damaged("/aux/0/surprise", 1), "surprise");
  expect(damaged("/aux/0/dtype", "i64"), first + ".dtype: no piece has elements \"i64\"");
  expect(damaged("/aux/0/shape", {1, 2, 3}), first + ".shape: expected at most two dimensions");
  expect(damaged("/aux/0/shape", {0, 2}), first + ".shape[0]");
  expect(damaged("/aux/0/shape", {int64_t{1} << 30, int64_t{1} << 30}), first + ".shape: exceeds");
  expect(damaged("/aux/0/offset", -1), first + ".offset");
  expect(damaged("/aux/0/offset", int64_t{1} << 46), first + ".offset");
  for (const char* file : {"../x", "/x", "", "x/../../y"}) {
    expect(damaged("/aux/0/file", file), first + ".file");
  }
  for (const char* key : {"name", "dtype", "shape", "file", "offset"}) {
    json plan = good;
    plan["tensors"][0]["source"]["aux"][0].erase(key);
    expect(plan, key);
  }
  json plan = good;
  plan["tensors"][0]["source"].erase("aux");
  expect(plan, "aux");
  plan = good;
  plan["slices"][0]["format"] = "f32";
  plan["slices"][0]["access"] = "mapped";
  expect(plan, "slices[0].access: \"embed\" does not lie in one piece");
  plan = good;
  size_t vector = 0;
  while (plan["tensors"][vector]["shape"].size() == 2) ++vector;
  plan["tensors"][vector]["source"] = good["tensors"][0]["source"];
  expect(plan, ".stored: vectors are not stored as gptq4");
}

TEST_CASE("a matrix in a format of HELM's own becomes what can be made of it, or is mapped") {
  json good = stored_plan();
  good["tensors"][0]["source"] = {
      {"stored", "c4.km32"},
      {"extents", json::array({{{"file", "a"}, {"offset", 64}, {"rows", 61}, {"row_stride", 0}}})}};
  REQUIRE(good["slices"][0]["tensor"] == "embed");
  for (const char* format : {"f32", "bf16", "bf16c", "c8.s32", "c4.km32"}) {
    good["slices"][0]["format"] = format;
    CHECK(message_of(good).empty());
  }
  good["slices"][0]["access"] = "mapped";
  CHECK(message_of(good).empty());
  json plan = good;
  plan["slices"][0]["format"] = "c8.s32";
  expect(plan, "slices[0].access: \"embed\" is stored as c4.km32, not c8.s32");
  plan = good;
  plan["tensors"][0]["source"]["extents"][0]["offset"] = 96;
  expect(plan, "slices[0].access: \"embed\" begins at 96, which is not aligned");
  plan = good;
  plan["slices"][0] = {
      {"tensor", "embed"}, {"device", "cpu"}, {"format", "c4.s32"}, {"access", "resident"}};
  expect(plan, "slices[0].format: \"embed\" is stored as c4.km32, which c4.s32 does not hold");
}

TEST_CASE("only what lies in its file as the CPU reads it can be mapped") {
  json good = stored_plan();
  json& source = good["tensors"][0]["source"];
  source = {
      {"stored", "f32"},
      {"extents", json::array({{{"file", "a"}, {"offset", 64}, {"rows", 61}, {"row_stride", 0}}})}};
  REQUIRE(good["slices"][0]["tensor"] == "embed");
  good["slices"][0]["access"] = "mapped";
  REQUIRE(message_of(good).empty());
  json plan = good;
  plan["tensors"][0]["source"]["stored"] = "bf16";
  expect(plan, "slices[0].access: \"embed\" is stored as bf16, not f32");
  plan = good;
  plan["tensors"][0]["source"]["extents"][0]["offset"] = 66;
  expect(plan, "slices[0].access: \"embed\" begins at 66, which is not aligned");
  plan = good;
  plan["tensors"][0]["source"]["extents"][0]["row_stride"] = 96;  // that of dense rows
  expect(plan, "slices[0].access: \"embed\" does not lie in one piece");
  plan = good;
  json& extents = plan["tensors"][0]["source"]["extents"];
  extents.push_back(extents[0]);
  extents[0]["rows"] = 60;
  extents[1]["rows"] = 1;
  expect(plan, "slices[0].access: \"embed\" does not lie in one piece");
}

TEST_CASE("what visits the accelerator is not bf16c") {
  helm::test::TinyShape shape;
  shape.weight_dtype = "bf16";
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  json plan = json::parse(helm::test::tiny_model(shape).plan);
  REQUIRE(message_of(plan).empty());
  size_t i = 0;
  while (plan["slices"][i]["format"] != "bf16" || plan["slices"][i]["device"] != "cpu") ++i;
  plan["slices"][i]["format"] = "bf16c";
  expect(plan, "visits the accelerator and cannot be bf16c");
  shape.visit_tokens = shape.visit_pages = 0;
  shape.devices = {"accelerator", "accelerator", "accelerator", "accelerator"};
  shape.accelerator_pages = shape.pages;
  shape.visiting = {"block.1.o"};
  json every = json::parse(helm::test::tiny_model(shape).plan);
  REQUIRE(message_of(every).empty());
  every["slices"][0]["format"] = "bf16c";
  expect(every, "\"block.1.o\" visits the accelerator and cannot be bf16c");
  plan["slices"][i]["format"] = "c4.km32";
  CHECK(message_of(plan).empty());  // which device takes it is seen when it loads
}
