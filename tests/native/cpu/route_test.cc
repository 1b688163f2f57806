// Which experts are chosen, and with which weights, against the rules written out.
#include "cpu/route.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace {

using helm::RouteOp;
using helm::RouteScore;

std::vector<float> routed(const RouteOp& op, const std::vector<float>& logits,
                          const std::vector<float>& bias = {}) {
  const auto count = static_cast<int64_t>(logits.size());
  std::vector<float> out(static_cast<size_t>(2 * op.chosen));
  std::vector<float> scratch(static_cast<size_t>(helm::cpu::route_scratch_floats(count)));
  helm::cpu::route(op, logits.data(), count, bias.empty() ? nullptr : bias.data(), out.data(),
                   scratch.data());
  return out;
}

RouteOp of(RouteScore score, int64_t chosen) {
  RouteOp op{};
  op.score = score;
  op.chosen = chosen;
  return op;
}

}  // namespace

TEST_CASE("routes: ids ascend, equal ones go to the lower id") {
  const std::vector<float> logits = {1, 3, 3, 0, 3};
  const std::vector<float> two = routed(of(RouteScore::kSoftmaxSelected, 2), logits);
  CHECK(two == std::vector<float>{1, 2, 0.5F, 0.5F});
  const std::vector<float> all = routed(of(RouteScore::kSoftmaxSelected, 5), logits);
  CHECK(std::vector<float>(all.begin(), all.begin() + 5) == std::vector<float>{0, 1, 2, 3, 4});
}

TEST_CASE("routes: softmax over all, normalised and scaled") {
  RouteOp op = of(RouteScore::kSoftmax, 2);
  const std::vector<float> logits = {std::log(1.0F), std::log(5.0F), std::log(2.0F),
                                     std::log(2.0F)};
  std::vector<float> found = routed(op, logits);
  CHECK(found[0] == 1);
  CHECK(found[1] == 2);
  CHECK(found[2] == doctest::Approx(0.5));
  CHECK(found[3] == doctest::Approx(0.2));
  op.normalise = true;
  op.scale = 7;
  found = routed(op, logits);
  CHECK(found[2] == doctest::Approx(5));
  CHECK(found[3] == doctest::Approx(2));
}

TEST_CASE("routes: a bias chooses and does not weigh, groups that are not kept have none") {
  RouteOp op = of(RouteScore::kSigmoid, 2);
  const std::vector<float> logits = {0, 0, 4, -4, 1, 1};
  const std::vector<float> bias = {0, 0, -1, 2, 0, 0};
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  std::vector<float> found = routed(op, logits, bias);
  CHECK(found[0] == 3);  // 2.02, then 0.73 twice
  CHECK(found[1] == 4);
  CHECK(found[2] == doctest::Approx(sigmoid(-4)));
  CHECK(found[3] == doctest::Approx(sigmoid(1)));
  op.groups = 3;
  op.groups_kept = 1;
  op.group_best = 2;
  found = routed(op, logits, bias);  // sums 1, 2, 1.46
  CHECK(found[0] == 2);
  CHECK(found[1] == 3);
  op.group_best = 1;
  found = routed(op, {9, 9, 1, 0, 1, 0}, {-9, -9, 0, 0, 0, 0});
  CHECK(found[0] == 2);
}

TEST_CASE("routes: two choices of sparsemixer, each over what is near its own") {
  RouteOp op = of(RouteScore::kSparsemixer, 2);
  op.near = 0.02F;
  const std::vector<float> found = routed(op, {1, 2, 1.99F, -5});
  CHECK(found[0] == 1);
  CHECK(found[1] == 2);
  CHECK(found[2] == doctest::Approx(1 / (1 + std::exp(-0.01))));
  CHECK(found[3] == doctest::Approx(1));
}

TEST_CASE("routes: minus infinity is chosen last and weighs nothing, NaN and infinity make NaN") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> some = routed(of(RouteScore::kSoftmax, 3), {-kInf, 1, -kInf, -kInf});
  CHECK(some == std::vector<float>{0, 1, 2, 0, 1, 0});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInf}) {
    const std::vector<float> found = routed(of(RouteScore::kSoftmax, 2), {1, 2, bad, 3});
    CHECK(found[0] == 0);
    CHECK(found[1] == 1);
    CHECK(std::isnan(found[2]));
    CHECK(std::isnan(found[3]));
  }
  CHECK(std::isnan(routed(of(RouteScore::kSoftmax, 1), {-kInf, -kInf})[1]));
}
