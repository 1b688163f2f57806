// Steps recorded as graphs and replayed, on the emulation.
#include "cuda/graphs.h"

#include <doctest/doctest.h>

#include "cuda_emulation.h"

using helm::cuda::StepShape;

TEST_CASE("a shape is launched, then captured, then replayed; few graphs are kept") {
  helm::cuda::CudaStream stream(0);
  helm::cuda::GraphCache cache;
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 256) == cudaSuccess);
  int launches = 0;
  const auto run = [&](int64_t tokens) {
    cache.run(StepShape{tokens, 1, 1, 1, 1, 1, 1}, stream.handle(), [&] {
      ++launches;
      CHECK(cudaMemsetAsync(memory, static_cast<int>(tokens), 256, stream.handle()) == cudaSuccess);
    });
    unsigned char got = 0;
    stream.download(&got, static_cast<helm::DeviceAddress>(reinterpret_cast<uintptr_t>(memory)), 1);
    stream.synchronize();
    CHECK(got == tokens);
  };
  for (int i = 0; i < 5; ++i) run(7);
  CHECK(launches == 2);
  CHECK(cache.captures() == 1);
  CHECK(cache.replays() == 4);
  for (int64_t tokens = 100; tokens < 200; ++tokens) run(tokens);  // the first is forgotten
  run(7);
  CHECK(launches == 103);
  run(7);
  run(7);
  CHECK(cache.captures() == 2);
  // A launch that fails while it is captured fails again as it is, and leaves the stream usable.
  run(8);
  CHECK_THROWS(cache.run(StepShape{8, 1, 1, 1, 1, 1, 1}, stream.handle(),
                         [] { throw helm::Error(helm::ErrorKind::kDevice, "refused"); }));
  run(8);
  CHECK(cache.captures() == 2);
  CHECK(cache.refusals() == 1);
  CHECK(cudaFree(memory) == cudaSuccess);
}

TEST_CASE("a shape that cannot be captured is launched as it is from then on") {
  helm::cuda::CudaStream stream(0);
  helm::cuda::GraphCache cache;
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 256) == cudaSuccess);
  int launches = 0;
  const auto run = [&](int64_t tokens, int value) {
    cache.run(StepShape{tokens, 1, 1, 1, 1, 1, 1}, stream.handle(), [&] {
      ++launches;
      CHECK(cudaMemsetAsync(memory, value, 256, stream.handle()) == cudaSuccess);
    });
    unsigned char got = 0;
    stream.download(&got, static_cast<helm::DeviceAddress>(reinterpret_cast<uintptr_t>(memory)), 1);
    stream.synchronize();
    CHECK(got == value);
  };
  cuda_emulation::refuse_captures(true);
  for (int i = 0; i < 5; ++i) run(7, 10 + i);
  cuda_emulation::refuse_captures(false);
  run(7, 20);
  CHECK(launches == 7);  // one of them was captured in vain
  CHECK(cache.captures() == 0);
  CHECK(cache.replays() == 0);
  CHECK(cache.refusals() == 1);
  run(8, 30);
  run(8, 30);
  CHECK(cache.captures() == 1);  // another shape is not concerned
  CHECK(cudaFree(memory) == cudaSuccess);
}
