// The predictor's tables as hostile input.
#include <doctest/doctest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "refused_plan.h"
#include "tiny_model.h"

namespace {

using helm::test::expect;
using helm::test::json;
using helm::test::message_of;

json with_predictor() {
  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  json plan = json::parse(helm::test::tiny_model(shape).plan);
  const json table = {1.0, 2.0};
  plan["predictor"] = {{"rows", {1, 8}},
                       {"cpu_s", table},
                       {"accelerator_s", table},
                       {"accelerator_beside_s", {1.0, 2.5}},
                       {"head_s", table},
                       {"attention",
                        {{{"window", 0},
                          {"layers", 2},
                          {"cpu_s", 0},
                          {"near_s", 1.5},
                          {"far_s", 3},
                          {"near_beside_s", 2},
                          {"far_beside_s", 3},
                          {"cpu_pair_s", table},
                          {"pair_s", table}}}}};
  for (const char* name :
       {"step_s", "prompt_row_s", "parts_s", "near_part_s", "ask_s", "ask_row_s", "answer_s",
        "answer_row_s", "block_to_host_s", "block_to_accelerator_s"}) {
    plan["predictor"][name] = 0.25;
  }
  return plan;
}

}  // namespace

TEST_CASE("a plan may have a predictor's tables") {
  const json good = with_predictor();
  REQUIRE(message_of(good) == "");
  const auto predictor = helm::Plan::from_json(good.dump()).predictor;
  REQUIRE(predictor.has_value());
  CHECK(predictor->rows == std::vector<int64_t>{1, 8});
  CHECK(predictor->head_s == std::vector<double>{1, 2});
  CHECK(predictor->attention[0].near_s == 1.5);
  CHECK(predictor->answer_row_s == 0.25);
  CHECK(predictor->attention[0].near_beside_s == 2);
  CHECK(predictor->accelerator_beside_s == std::vector<double>{1, 2.5});
  json plan = good;
  plan["predictor"] = nullptr;
  CHECK(!helm::Plan::from_json(plan.dump()).predictor.has_value());
  plan.erase("predictor");
  CHECK(!helm::Plan::from_json(plan.dump()).predictor.has_value());
}

TEST_CASE("damaged tables of a predictor are named") {
  const json good = with_predictor();
  const auto damaged = [&](const char* pointer, const json& value) {
    json plan = good;
    plan[json::json_pointer(pointer)] = value;
    return plan;
  };
  expect(damaged("/predictor", 1), "predictor: expected an object");
  expect(damaged("/predictor/more", 1), "predictor: unknown key \"more\"");
  expect(damaged("/predictor/rows", json::array()), "predictor.rows: expected 1 to 64 counts");
  expect(damaged("/predictor/rows", json(65, 1)), "predictor.rows: expected 1 to 64 counts");
  expect(damaged("/predictor/rows/0", 2), "predictor.rows[0]: expected counts that rise from 1");
  expect(damaged("/predictor/rows/1", 1), "predictor.rows[1]: expected counts that rise from 1");
  expect(damaged("/predictor/rows/1", int64_t{1} << 40), "predictor.rows[1]");
  for (const char* name : {"cpu_s", "accelerator_s", "accelerator_beside_s", "head_s"}) {
    const std::string path = std::string("/predictor/") + name;
    expect(damaged(path.c_str(), {1.0}), std::string("predictor.") + name + ": expected 2 entries");
    expect(damaged((path + "/1").c_str(), -1), std::string("predictor.") + name + "[1]: expected");
  }
  expect(damaged("/predictor/attention", json::array()), "predictor.attention: expected 1 to 16");
  json twice = good;
  twice["predictor"]["attention"].push_back(good["predictor"]["attention"][0]);
  expect(twice, "predictor.attention[1].window: is listed twice");
  expect(damaged("/predictor/attention/0/window", -1), "predictor.attention[0].window");
  expect(damaged("/predictor/attention/0/layers", 1.5), "predictor.attention[0].layers");
  expect(damaged("/predictor/attention/0/far_s", -1e-9), "predictor.attention[0].far_s: expected");
  expect(damaged("/predictor/attention/0/near_s", 1e300), "predictor.attention[0].near_s");
  expect(damaged("/predictor/attention/0/pair_s", {1, 2, 3}), "attention[0].pair_s: expected 2");
  for (const char* name :
       {"step_s", "prompt_row_s", "parts_s", "near_part_s", "ask_s", "ask_row_s", "answer_s",
        "answer_row_s", "block_to_host_s", "block_to_accelerator_s"}) {
    const std::string path = std::string("/predictor/") + name;
    expect(damaged(path.c_str(), -1), std::string("predictor.") + name + ": expected seconds");
    expect(damaged(path.c_str(), "1"), std::string("predictor.") + name);
  }
  expect(damaged("/predictor/attention/0/near_beside_s", 1.25),
         "attention[0].near_beside_s: expected no less than near_s");
  expect(damaged("/predictor/attention/0/far_beside_s", 2.5),
         "attention[0].far_beside_s: expected no less than far_s");
  expect(damaged("/predictor/accelerator_beside_s/1", 1.5),
         "predictor.accelerator_beside_s[1]: expected no less than accelerator_s");
  json alone = json::parse(helm::test::tiny_model().plan);
  alone["predictor"] = good["predictor"];
  expect(alone, "predictor: expected null, as all units lie on the CPU");
}
