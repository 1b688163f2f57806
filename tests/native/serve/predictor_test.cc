// What steps take in each mode, against sums by hand and what Python's planner says of the same
// tables (tests/data/steady_rates.json).
#include "serve/predictor.h"

#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tiny_model.h"

namespace {

using helm::Predictor;
using helm::PredictorTables;
using helm::StepLoad;
using helm::StepMode;

// Two layers that see all and one that sees four positions, all on the accelerator.
PredictorTables tables() {
  PredictorTables t;
  t.rows = {1, 2, 10};
  t.cpu_s = {1, 1, 1};
  t.accelerator_s = t.accelerator_beside_s = {30, 30, 70};
  t.head_s = {2, 3, 11};
  t.attention = {{0, 2, 0, 0.2, 2, 0.2, 2, {0, 0, 0}, {0.1, 0.1, 0.1}},
                 {4, 1, 0.5, 0.1, 1, 0.1, 1, {0, 0, 0}, {0.05, 0.05, 0.05}}};
  t.step_s = 5;
  t.prompt_row_s = 0.25;
  t.parts_s = 0.5;
  t.near_part_s = 0.125;
  t.ask_s = 1;
  t.ask_row_s = 0.25;
  t.answer_s = 0.5;
  t.answer_row_s = 0.125;
  t.block_to_accelerator_s = 16;
  return t;
}

}  // namespace

TEST_CASE("a near step takes its rows, its attention and its head") {
  const Predictor predictor(tables(), 8);
  StepLoad load = predictor.load();
  predictor.add(load.near, 3);
  predictor.add(load.near, 10);
  load.outputs = 2;
  // step + cpu + accelerator + head; 13 positions of two layers, 3 + 4 of the one with a window
  CHECK(predictor.seconds(StepMode::kNear, load) ==
        doctest::Approx(5 + 1 + 30 + 3 + 13 * 0.2 + 7 * (0.1 + 0.5)));
  for (const StepMode mode : {StepMode::kJoint, StepMode::kSplit}) {  // nothing is far
    CHECK(predictor.seconds(mode, load) == predictor.seconds(StepMode::kNear, load));
  }
  // Six rows lie between two and ten; pairs 3+4+5+6 of all, 3+4+4+4 within the window.
  predictor.add_prompt(load, 2, 4, true);
  CHECK(predictor.seconds(StepMode::kNear, load) ==
        doctest::Approx(5 + 1 + 50 + 3 + 4 * 0.25 + 2 * 2.0 + 13 * 0.2 + 7 * 0.6 + 18 * 0.1 +
                        std::max(15 * 0.05, 6 * 0.1) + 6 * 0.5));
  // Beyond the table, by its last two.
  StepLoad many = predictor.load();
  for (int i = 0; i < 26; ++i) predictor.add(many.near, 0);
  CHECK(predictor.seconds(StepMode::kNear, many) == doctest::Approx(5 + 1 + 70 + 16 * 5));
}

TEST_CASE("in a joint step the CPU attends beside the accelerator, layer by layer") {
  PredictorTables own = tables();
  const Predictor predictor(own, 8);
  StepLoad load = predictor.load();
  predictor.add(load.near, 100);
  predictor.add(load.far[0], 3);
  predictor.add(load.far[1], 10);
  load.outputs = 3;
  const double rest = 5 + 1 + 35 + 5 * 0.0 + (3 + 1.0) + 3 * 0.5;  // head between 2 and 10 rows
  const double ask = 1 + 3 * 0.0 + 2 * 0.25, answer = 0.5 + 2 * 0.125;
  const double all = std::max(100 * 0.2 + 2 * 0.125, 2 * (ask + answer) + 13 * 2.0);
  const double window = std::max(4 * 0.1 + 0.125, ask + answer + 7 * 1.0);
  CHECK(predictor.seconds(StepMode::kJoint, load) ==
        doctest::Approx(rest + all + window + 0.5 * (4 + 7)));
  // While both attend each keeps half of its rate. In the first layers that is from when the CPU
  // was asked until near attention ends, whose fixed cost stays.
  for (helm::AttentionTimes& layers : own.attention) {
    layers.near_beside_s = 2 * layers.near_s;
    layers.far_beside_s = 2 * layers.far_s;
  }
  const double both = (20 + 0.25 - 2 * ask) * (40 + 0.25) / (20 + 0.25);
  CHECK(Predictor(own, 8).seconds(StepMode::kJoint, load) ==
        doctest::Approx(rest + all + window + 0.5 * (4 + 7) + both / 2));
  // Where near attention alone is disturbed it is the last, as long as the CPU attends.
  for (helm::AttentionTimes& layers : own.attention) layers.far_beside_s = layers.far_s;
  const double near = 20.25 + 13 * 2.0 * (1 - 20.25 / 40.25);
  CHECK(Predictor(own, 8).seconds(StepMode::kJoint, load) ==
        doctest::Approx(rest + near + window + 0.5 * (4 + 7)));
}

TEST_CASE("in a split step each sub-batch hides the CPU's attention for the other") {
  const Predictor predictor(tables(), 8);
  StepLoad load = predictor.load();
  predictor.add(load.near, 100);
  predictor.add(load.far[0], 3);
  predictor.add(load.far[1], 10);
  load.outputs = 3;
  const double fixed = 5 + 2 * 1 + 4 + 2 * 3 * 0.5 + 0.5 * (4 + 3 + 4);
  const double one = 1 + 0.25 + 0.5 + 0.125;  // to ask for a row in a layer, and the answer
  const double all = std::max(20.0, 2 * one + 10 * 2.0) + std::max(20 + 20.0, 2 * one + 3 * 2.0);
  const double window = std::max(10.0, one + 4.0) + std::max(10 + 0.4, one + 3.0);
  CHECK(predictor.seconds(StepMode::kSplit, load) == doctest::Approx(fixed + all + window));
  // Beside the CPU products take twice as long: the first sub-batch's, until the CPU has answered
  // the second; those of the second sub-batch end after the CPU.
  PredictorTables slow = tables();
  slow.accelerator_beside_s = {60, 60, 140};
  const double cpu_s = 2 * one + 20.0, cpu_window_s = one + 4.0;
  const double first_s = 20 + cpu_s / 2, first_window_s = 10 + cpu_window_s / 2;
  const double second_cpu_s = 2 * one + 6.0, second_window_cpu_s = one + 3.0;
  const double second_s = 40 + second_cpu_s * (1 - 40.0 / 60);
  const double second_window_s = 10.4 + second_window_cpu_s * (1 - 10.4 / 20.4);
  CHECK(Predictor(slow, 8).seconds(StepMode::kSplit, load) ==
        doctest::Approx(fixed + first_s + first_window_s + second_s + second_window_s));
  const auto hidden = predictor.hidden_s(load);
  CHECK(hidden[0] == doctest::Approx(30 + 20 + 0.4 - 3 * one - 6 - 3));
  CHECK(hidden[1] == doctest::Approx(30 - 3 * one - 20 - 4));
}

TEST_CASE("corrections follow what steps took, within bounds, each mode for itself") {
  Predictor predictor(tables(), 8);
  predictor.note(StepMode::kNear, 1, 1);
  predictor.note(StepMode::kJoint, 2, 3);
  CHECK(predictor.correction(StepMode::kJoint) == doctest::Approx(1.05));
  CHECK(predictor.correction(StepMode::kSplit) == doctest::Approx(1.05));  // it never ran
  CHECK(predictor.corrected_s(StepMode::kJoint, 4) == doctest::Approx(4.2));
  CHECK(predictor.correction(StepMode::kNear) == 1);
  for (int i = 0; i < 100; ++i) predictor.note(StepMode::kJoint, 1, 1.5);
  CHECK(predictor.correction(StepMode::kJoint) == doctest::Approx(1.5).epsilon(0.01));
  for (int i = 0; i < 100; ++i) predictor.note(StepMode::kJoint, 1, 1000);
  CHECK(predictor.correction(StepMode::kJoint) == Predictor::kMost);
  for (int i = 0; i < 100; ++i) predictor.note(StepMode::kJoint, 1, 1e-9);
  CHECK(predictor.correction(StepMode::kJoint) == Predictor::kLeast);
  for (const double odd : {0.0, -1.0, std::nan("")}) {
    predictor.note(StepMode::kNear, 1, odd);
    predictor.note(StepMode::kNear, odd, 1);
  }
  CHECK(predictor.correction(StepMode::kNear) == 1);
}

TEST_CASE("steady rates are those of the planner") {
  std::ifstream file(HELM_TEST_DATA "/steady_rates.json");
  const nlohmann::json data = nlohmann::json::parse(file);
  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  nlohmann::json text = nlohmann::json::parse(helm::test::tiny_model(shape).plan);
  int64_t checked = 0;
  for (const nlohmann::json& machine : data) {
    text["predictor"] = machine["predictor"];
    const helm::Plan plan = helm::Plan::from_json(text.dump());
    const Predictor predictor(plan.predictor.value(), machine["page_tokens"]);
    for (const nlohmann::json& one : machine["rates"]) {
      CAPTURE(one.dump());
      const size_t mode = std::find(helm::kStepModeNames.begin(), helm::kStepModeNames.end(),
                                    one["mode"].get<std::string>()) -
                          helm::kStepModeNames.begin();
      const double rate =
          predictor.steady_rate(static_cast<StepMode>(mode), one["near"], one["far"],
                                {one["prompt"], one["output"], one["chunk"]});
      // The runtime reads the tables in single precision.
      CHECK(rate == doctest::Approx(one["rate"].get<double>()).epsilon(1e-5));
      ++checked;
    }
  }
  CHECK(checked > 20);
}
