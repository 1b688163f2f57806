// Products whose input the op before has narrowed: launches, and the bits of narrowing it apart.
#include "cuda/narrowing.h"

#include <doctest/doctest.h>

#include <span>
#include <vector>

#include "cuda/device.h"
#include "cuda_emulation.h"
#include "oracle.h"
#include "reference_blas.h"
#include "support/check.h"
#include "tiny_model.h"

namespace {

constexpr helm::DType kPacked = helm::DType::kBF16;

using helm::Op;
using helm::Plan;

// Runs the ops as one stage, or each as one, over the same random weights and values.
struct Outcome {
  std::vector<std::vector<float>> values;  // by value
  int64_t launches = 0;
};
Outcome run(const Plan& plan, std::span<const Op> ops, int64_t rows, bool together) {
  helm::cuda::CudaDevice device({}, helm::test::reference_blas());
  const auto stream = device.create_stream();
  const auto buffer = [&](int64_t bytes) { return device.allocate(bytes, "the test"); };
  helm::StageSpec spec;
  spec.plan = &plan;
  for (const helm::SliceSpec& slice : plan.slices) {  // one of each tensor
    const helm::TensorSpec& tensor = plan.tensors[static_cast<size_t>(slice.tensor)];
    const auto values = helm::test::random_floats(tensor.rows() * tensor.cols(), 7);
    const auto bytes = helm::test::encode(helm::dtype_of(slice.format), values);
    spec.weights.push_back({buffer(plan.bytes(slice)), slice.format});
    stream->upload(spec.weights.back().address, bytes.data(), plan.bytes(slice));
    stream->synchronize();
  }
  for (const helm::ValueSpec& value : plan.values) {
    const auto values = helm::test::random_floats(rows * value.width, 8);
    spec.values.push_back(buffer(rows * value.width * 4));
    stream->upload(spec.values.back(), values.data(), rows * value.width * 4);
    stream->synchronize();
  }
  std::vector<helm::UnitSpec> units;
  if (together) units.push_back({.name = "ops", .ops = {ops.begin(), ops.end()}});
  for (const Op& op : ops) {
    if (!together) units.push_back({.name = "op", .ops = {op}});
  }
  spec.workspace = buffer(device.workspace_bytes(plan, units));
  std::vector<std::unique_ptr<helm::Stage>> stages;
  for (const helm::UnitSpec& unit : units) {
    spec.units = {&unit, 1};
    stages.push_back(device.compile(spec));
  }
  const std::vector<int32_t> ids(static_cast<size_t>(rows)), outputs(static_cast<size_t>(rows));
  Outcome outcome;
  const int64_t before = cuda_emulation::launches();
  for (const auto& stage : stages) stage->run(*stream, {ids, ids, outputs, {}});
  outcome.launches = cuda_emulation::launches() - before;
  for (size_t v = 0; v < plan.values.size(); ++v) {
    outcome.values.emplace_back(static_cast<size_t>(rows * plan.values[v].width));
    stream->download(outcome.values.back().data(), spec.values[v], rows * plan.values[v].width * 4);
  }
  stream->synchronize();
  return outcome;
}

// A norm or activation of the first layer and the product after it.
template <class Producer>
std::vector<Op> pair_of(const Plan& plan) {
  for (const helm::UnitSpec& unit : {plan.units[1], plan.units[2]}) {
    const std::vector<Op>& ops = unit.ops;
    for (size_t i = 0; i + 1 < ops.size(); ++i) {
      if (std::holds_alternative<Producer>(ops[i])) return {ops[i], ops[i + 1]};
    }
  }
  return {};
}

Plan plan_of(const char* dtype) {
  helm::test::TinyShape shape;
  shape.weight_dtype = dtype;
  shape.qkv_bias = true;  // its parts do not lie side by side
  return Plan::from_json(helm::test::tiny_model(shape).plan);
}

}  // namespace

TEST_CASE("norms and activations narrow for the product that follows, with the same bits") {
  for (const char* dtype : {"f16", "bf16"}) {
    const Plan plan = plan_of(dtype);
    for (const std::vector<Op>& ops :
         {pair_of<helm::NormOp>(plan), pair_of<helm::ActivationOp>(plan)}) {
      REQUIRE(ops.size() == 2);
      const auto narrowing =
          helm::cuda::narrowing_between(plan, ops[0], plan.units[1], ops[1], kPacked);
      CHECK(narrowing.dtype == helm::dtype_from_name(dtype));
      CHECK(narrowing.alone);
      const auto product = static_cast<size_t>(std::get<helm::LinearOp>(ops[1]).out);
      const Outcome apart = run(plan, ops, 20, false), together = run(plan, ops, 20, true);
      CHECK(together.launches == apart.launches - 1);
      CHECK(together.values[product] == apart.values[product]);
      // Few rows are not narrowed.
      const Outcome few = run(plan, ops, 8, true), few_apart = run(plan, ops, 8, false);
      CHECK(few.launches == few_apart.launches);
      CHECK(few.values == few_apart.values);
    }
  }
}

TEST_CASE("what others read is written in f32 as well") {
  Plan plan = plan_of("f16");
  const std::vector<Op> ops = pair_of<helm::NormOp>(plan);
  const helm::ValueIndex narrowed = std::get<helm::LinearOp>(ops[1]).in;
  plan.units.back().ops.emplace_back(helm::SelectOp{narrowed, plan.logits});
  const auto narrowing =
      helm::cuda::narrowing_between(plan, ops[0], plan.units[1], ops[1], kPacked);
  CHECK(narrowing.dtype == helm::DType::kF16);
  CHECK_FALSE(narrowing.alone);
  const Outcome apart = run(plan, ops, 20, false), together = run(plan, ops, 20, true);
  CHECK(together.launches == apart.launches - 1);
  CHECK(together.values == apart.values);
}

TEST_CASE("what does not fit the product is not narrowed for it") {
  Plan plan = plan_of("f16");
  const auto none = [&](const Op& op, const Op& next) {
    return helm::cuda::narrowing_between(plan, op, plan.units[1], next, kPacked).dtype ==
           helm::DType::kF32;
  };
  const std::vector<Op> ops = pair_of<helm::NormOp>(plan);
  CHECK(none(ops[1], ops[0]));
  CHECK(none(ops[0], ops[0]));
  helm::NormOp part = std::get<helm::NormOp>(ops[0]);
  part.size /= 2;
  CHECK(none(part, ops[1]));  // half of what the product reads
  part.out_offset = part.size;
  CHECK(none(part, ops[1]));
  helm::LinearOp mixed = std::get<helm::LinearOp>(ops[1]);
  plan.slices[static_cast<size_t>(mixed.parts.back().weight)].format = {};  // f32
  CHECK(none(ops[0], mixed));
  mixed.in = mixed.out;
  CHECK(none(ops[0], mixed));
  const Plan plain = plan_of("f32");
  const std::vector<Op> in_f32 = pair_of<helm::NormOp>(plain);
  CHECK(helm::cuda::narrowing_between(plain, in_f32[0], plain.units[1], in_f32[1], kPacked).dtype ==
        helm::DType::kF32);
}
