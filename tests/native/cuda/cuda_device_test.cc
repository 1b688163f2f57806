// The CUDA device and its stages, on the emulation or on a GPU (cuda_test_device.h says which).
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "cuda_test_device.h"
#include "device/device_conformance.h"
#include "support/this_build.h"

namespace {

using helm::test::conform_attention_pieces;
using helm::test::conform_stage;
using helm::test::kFew;
using helm::test::open_cuda_test_device;
using helm::test::stage_logits;
using helm::test::TinyShape;

// Odd sizes: heads that share K and V, pages that a step crosses.
TinyShape shape(const std::string& weight_dtype, const std::string& kv_dtype) {
  TinyShape shape;
  shape.weight_dtype = weight_dtype;
  shape.kv_dtype = kv_dtype;
  return shape;
}

}  // namespace

TEST_CASE("memory is counted, refused beyond the limit and given back") {
  helm::test::conform_allocation(open_cuda_test_device);
  const auto device = open_cuda_test_device(int64_t{4} << 20);
  try {
    device->allocate(int64_t{5} << 20, "the KV cache");
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(std::string(error.what())
              .find("the KV cache needs 5.0 MiB on cuda:0, 4.0 MiB free, "
                    "limit 4.0 MiB") != std::string::npos);
  }
}

TEST_CASE("bytes survive copies") {
  helm::test::conform_copies(open_cuda_test_device);
}

TEST_CASE("streams and events order work") {
  helm::test::conform_ordering(open_cuda_test_device);
}

TEST_CASE("formats without kernels are refused by name") {
  helm::test::conform_formats(open_cuda_test_device);
}

TEST_CASE("streams and events outlive their device") {
  auto device = open_cuda_test_device(0);
  const auto event = device->create_event();
  const auto stream = device->create_stream();
  device.reset();
  stream->record(*event);
  event->synchronize();
}

TEST_CASE("a stage agrees with the scalar oracle: f32") {
  conform_stage(open_cuda_test_device, {shape("f32", "f32")});
}

TEST_CASE("a cache of integers is refused by name") {
  try {
    conform_stage(open_cuda_test_device, {shape("f32", "i8")});
    FAIL("no error was thrown");
  } catch (const helm::Error& error) {
    CHECK(error.kind() == helm::ErrorKind::kInvalid);
    CHECK(std::string(error.what()).find("the KV cache is i8") != std::string::npos);
  }
}

TEST_CASE("a stage agrees with the scalar oracle: f16 and bf16") {
  conform_stage(open_cuda_test_device, {shape("f16", "f16"), true});
  conform_stage(open_cuda_test_device, {shape("bf16", "bf16"), true});
  conform_stage(open_cuda_test_device, {shape("bf16", "f16"), true});
}

TEST_CASE("a stage agrees with the scalar oracle: norms of q and k, biases, window, small pages") {
  TinyShape variant = shape("f32", "f32");
  variant.qk_norm = true;
  variant.qkv_bias = true;
  variant.window = 21;
  variant.page_tokens = 4;
  variant.pages = 1000;
  conform_stage(open_cuda_test_device, {variant});
  variant.weight_dtype = "f16";
  conform_stage(open_cuda_test_device, {variant, true});
}

TEST_CASE(
    "a stage agrees with the scalar oracle: layers and head in parts, added and side by side") {
  TinyShape cut = helm::test::cut_shape();
  conform_stage(open_cuda_test_device, {cut});
  cut.weight_dtype = cut.kv_dtype = "f16";
  conform_stage(open_cuda_test_device, {cut, true});
}

TEST_CASE("a stage agrees with the scalar oracle: soft caps, scales, norms behind, neighbours") {
  TinyShape variant = shape("f32", "f32");
  variant.varied = true;
  variant.softcap = 4;
  conform_stage(open_cuda_test_device, {variant});
  variant.weight_dtype = variant.kv_dtype = "bf16";
  conform_stage(open_cuda_test_device, {variant, true});
}

TEST_CASE("a stage agrees with the scalar oracle: mixtures of experts, sinks") {
  TinyShape mixture = shape("f32", "f32");
  mixture.experts = 6;
  conform_stage(open_cuda_test_device, {mixture});
  mixture.experts_layout = "halves";
  mixture.score = "sigmoid";
  conform_stage(open_cuda_test_device, {mixture});
  mixture.experts = 37;  // more than a warp
  mixture.experts_layout = "neighbours";
  mixture.score = "softmax_selected";
  if (kFew) {
    mixture.layers = 1;
  } else {
    conform_stage(open_cuda_test_device, {mixture});
  }
  mixture.weight_dtype = mixture.kv_dtype = "bf16";
  conform_stage(open_cuda_test_device, {mixture, true});
}

TEST_CASE("attention in parts agrees with the scalar oracle") {
  using helm::DType;
  for (const auto& [name, dtype] :
       {std::pair{"f32", DType::kF32}, {"f16", DType::kF16}, {"bf16", DType::kBF16}}) {
    conform_attention_pieces(open_cuda_test_device, shape("f32", name), DType::kF32, dtype);
  }
  TinyShape variant = shape("f32", "f16");
  variant.heads = 16;
  variant.head_dim = 24;
  variant.window = 37;
  variant.page_tokens = 5;
  conform_attention_pieces(open_cuda_test_device, variant, DType::kF32, DType::kF16);
}

TEST_CASE("a stage that never has many rows needs no cuBLAS") {
  TinyShape few = shape("f16", "f32");
  few.step_tokens = 32;
  const auto device = open_cuda_test_device(0);
  const auto bytes = [&](int64_t step_tokens) {
    few.step_tokens = step_tokens;
    const auto plan = helm::Plan::from_json(helm::test::tiny_model(few).plan);
    return device->workspace_bytes(plan, plan.units);
  };
  CHECK(bytes(8) < int64_t{1} << 20);
  CHECK(bytes(9) > int64_t{8} << 20);
}

TEST_CASE("captured steps give the bits of uncaptured ones") {
  for (const char* dtype : {"f32", "bf16"}) {
    if (kFew && dtype == std::string("f32")) continue;
    const auto captured = stage_logits(open_cuda_test_device, shape(dtype, dtype));
    setenv("HELM_CUDA_GRAPHS", "0", 1);
    const auto plain = stage_logits(open_cuda_test_device, shape(dtype, dtype));
    unsetenv("HELM_CUDA_GRAPHS");
    CHECK(captured == plain);
  }
}
