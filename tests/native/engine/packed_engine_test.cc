// The engine on packed weights: results that do not depend on batch, chunks, threads, devices or
// integer kernels, and are near those of the weights as they were.
#include <doctest/doctest.h>
#include <stdlib.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/integer_isa.h"
#include "helm/generation.h"
#include "tiny_model.h"

namespace helm::test {
namespace {

// The embedding, which is the head too, in eight bits; all else in four.
TinyModel mixed(TinyShape shape) {
  shape.weight_dtype = "c4.km32";
  return tiny_model(shape).with("/slices/0/format", "\"c8.s32\"");
}

std::vector<TinyModel> packed_models(const TinyShape& shape) {
  TinyShape q8 = shape, q4 = shape;
  q8.weight_dtype = "c8.s32", q4.weight_dtype = "c4.km32";
  return {tiny_model(q8), tiny_model(q4), mixed(shape)};
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("packed weights: logits are bit-identical for every chunking and thread count") {
  const std::vector<int32_t> ids = token_ids(70, 1);
  for (size_t m = 0; m < 3; ++m) {
    const auto model = packed_models({.qkv_bias = true})[m];
    const std::vector<float> reference = logits_of(*tiny_engine(model), ids, 70);
    for (const size_t chunk : {1, 2, 3, 4, 7, 8, 9, 31}) {
      CHECK(logits_of(*tiny_engine(model), ids, chunk) == reference);
    }
    for (const int threads : {1, 3}) {
      const auto other = packed_models({.qkv_bias = true, .threads = threads})[m];
      CHECK(logits_of(*tiny_engine(other), ids, 70) == reference);
      CHECK(logits_of(*tiny_engine(other), ids, 5) == reference);
    }
  }
}

TEST_CASE("packed weights: a batch of sequences gives each what it gets alone") {
  for (const TinyModel& model : packed_models({})) {
    const auto engine = tiny_engine(model);
    std::vector<Request> requests;
    std::vector<std::vector<int32_t>> alone;
    for (int32_t i = 0; i < 7; ++i) {
      Request one;
      one.prompt = token_ids(1 + 9 * i, i);
      one.max_tokens = 5 + i;
      alone.push_back(generated(*engine, {one})[0]);
      requests.push_back(std::move(one));
    }
    CHECK(generated(*engine, requests) == alone);
  }
}

TEST_CASE("packed weights: every integer kernel gives the same logits") {
  const char* before = getenv("HELM_CPU_INT");
  const std::string old = before == nullptr ? "" : before;
  const std::vector<int32_t> ids = token_ids(40, 2);
  for (const TinyModel& model : packed_models({})) {
    std::vector<std::vector<float>> all;
    for (const cpu::IntegerStatus& status : cpu::integer_report()) {
      if (!status.available) continue;
      setenv("HELM_CPU_INT", cpu::integer_name(status.isa), 1);
      all.push_back(logits_of(*tiny_engine(model), ids, 11));
    }
    for (const std::vector<float>& logits : all) CHECK(logits == all.front());
  }
  before == nullptr ? unsetenv("HELM_CPU_INT") : setenv("HELM_CPU_INT", old.c_str(), 1);
}

TEST_CASE("packed weights: logits are near those of the weights as they were") {
  const std::vector<int32_t> ids = token_ids(30, 3);
  const std::vector<float> exact = logits_of(*tiny_engine(tiny_model()), ids, 30);
  const std::vector<TinyModel> models = packed_models({});
  const double q8 = distance(logits_of(*tiny_engine(models[0]), ids, 30), exact);
  const double q4 = distance(logits_of(*tiny_engine(models[1]), ids, 30), exact);
  CHECK(q8 > 0);
  CHECK(q8 < 0.05);
  CHECK(q4 > q8);
  CHECK(q4 < 0.5);
}

TEST_CASE("packed weights: an accelerator's bits are the CPU's, resident and visiting") {
  const std::vector<int32_t> ids = token_ids(70, 4);
  for (size_t m = 0; m < 2; ++m) {
    const std::vector<float> want = logits_of(*tiny_engine(packed_models({})[m]), ids, 70);
    TinyShape split;
    split.devices = {"cpu", "cpu", "accelerator", "accelerator"};
    split.accelerator_pages = 100;
    CHECK(logits_of(*tiny_engine(packed_models(split)[m]), ids, 70) == want);
    TinyShape visiting = split;
    visiting.visit_tokens = 8, visiting.visit_pages = 40;
    CHECK(logits_of(*tiny_engine(packed_models(visiting)[m]), ids, 70) == want);
  }
}

TEST_CASE("packed weights: what no scale holds is refused by tensor and row") {
  TinyModel model = tiny_model({.weight_dtype = "c8.s32"});
  (*model.tensors.at("block.1.up").data)[24 * 19 + 3] = std::numeric_limits<float>::quiet_NaN();
  try {
    tiny_engine(model);
    FAIL("a weight is NaN");
  } catch (const Error& error) {
    const std::string message = error.what();
    CHECK(error.kind() == ErrorKind::kIo);
    CHECK(message.find("tensor \"block.1.up\" has weights in row 19") != std::string::npos);
    CHECK(message.find("c8.s32") != std::string::npos);
  }
}

}  // namespace helm::test
