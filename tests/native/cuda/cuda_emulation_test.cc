// The emulation itself: barriers, exchanges and shared memory of kernels, order of streams, events
// and graphs, and that each kind of mistake is a fault.
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "launch.h"

namespace helm::test {
namespace {

using cuda::dynamic_shared;
using cuda::launch;

// Runs a kernel to its end and returns the fault, or "".
template <class... Params, class... Args>
std::string run(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, Args... args) {
  launch(kernel, grid, block, shared, nullptr, args...);
  const cudaError_t error = cudaDeviceSynchronize();
  const std::string fault = cuda_emulation::fault();
  CHECK((error == cudaSuccess) == fault.empty());
  cuda_emulation::clear_fault();
  return fault;
}

bool says(const std::string& fault, const char* part) {
  return fault.find(part) != std::string::npos;
}

// out(block) = sum of the block's part of x, through shared memory and shuffles.
void sum_kernel(const float* x, float* out) {
  __shared__ float partial[32];
  const unsigned i = threadIdx.x + blockIdx.x * blockDim.x;
  float v = x[i];
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += partial[w];
    out[blockIdx.x] = sum;
  }
}

void rotate_kernel(int* out, int rounds) {
  int* shared = dynamic_shared<int>();
  const unsigned n = blockDim.x;
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  for (int r = 0; r < rounds; ++r) {
    __syncthreads();
    const int next = shared[(threadIdx.x + 1) % n];
    __syncthreads();
    shared[threadIdx.x] = next;
  }
  out[threadIdx.x] = shared[threadIdx.x];
}

void index_kernel(unsigned* out) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  ++out[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

void exchange_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned low = 0x0000ffffu, mask = lane < 16 ? low : ~low;
  out[lane] = __shfl_sync(mask, lane * 10, 3, 16);
  out[32 + lane] = __shfl_down_sync(0xffffffffu, lane, 5);
  out[64 + lane] = static_cast<int>(__ballot_sync(mask, lane % 2));
}

void divergent_exit_kernel(int* out) {
  if (threadIdx.x % 2 == 1) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

void missing_lane_kernel(int* out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
void diverged_barrier_kernel(int* out) {
  if (threadIdx.x < 8) __syncthreads();
  out[threadIdx.x] = __any_sync(0xffffffffu, 1);
}
void unlisted_lane_kernel(int* out) {
  out[threadIdx.x] = __shfl_sync(0x1u, 1, 0);
}
void outside_mask_kernel(int* out) {
  if (threadIdx.x < 4) out[threadIdx.x] = __shfl_sync(0xfu, 1, 9);
}
void overrun_kernel(int bytes) {
  dynamic_shared<char>()[bytes] = 1;
}
void unaligned_kernel(const float* p, float* out) {
  *out = __ldg(reinterpret_cast<const float4*>(p)).x;
}
void fill_kernel(int* out, int n, int value) {
  for (int i = 0; i < n; ++i) out[i] = value;
}
void add_kernel(int* out, const int* by) {
  *out += *by;
}
void awaiting_kernel(int* out, unsigned threads) {
  cuda::let_next_begin();
  if (threadIdx.x >= threads) return;
  cuda::await_previous();
  out[threadIdx.x] = 1;
}

}  // namespace

TEST_CASE("emulation: sums through shuffles and shared memory, many warps and blocks") {
  for (unsigned threads : {32u, 96u, 1024u}) {
    const unsigned blocks = 3;
    std::vector<float> x(threads * blocks), out(blocks);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17);
    CHECK(run(sum_kernel, blocks, threads, 0, x.data(), out.data()) == "");
    for (unsigned b = 0; b < blocks; ++b) {
      float want = 0;
      for (unsigned i = 0; i < threads; ++i) want += x[b * threads + i];
      CHECK(out[b] == want);
    }
  }
}

TEST_CASE("emulation: barriers order all threads, also in blocks of ragged size") {
  for (unsigned threads : {1u, 31u, 33u, 250u}) {
    std::vector<int> out(threads);
    CHECK(run(rotate_kernel, 1, threads, threads * sizeof(int), out.data(), 7) == "");
    for (unsigned i = 0; i < threads; ++i) CHECK(out[i] == static_cast<int>((i + 7) % threads));
  }
}

TEST_CASE("emulation: every index of a three-dimensional grid runs once") {
  std::vector<unsigned> out(2 * 3 * 4 * 5 * 2 * 3);
  CHECK(run(index_kernel, dim3(2, 3, 4), dim3(5, 2, 3), 0, out.data()) == "");
  for (unsigned count : out) CHECK(count == 1);
}

TEST_CASE("emulation: exchanges of parts of a warp") {
  std::vector<int> out(96);
  CHECK(run(exchange_kernel, 1, 32, 0, out.data()) == "");
  for (int lane = 0; lane < 32; ++lane) {
    const size_t i = static_cast<size_t>(lane);
    CHECK(out[i] == (lane < 16 ? 30 : 190));
    CHECK(out[32 + i] == (lane < 27 ? lane + 5 : lane));
    CHECK(static_cast<unsigned>(out[64 + i]) == (lane < 16 ? 0xaaaau : 0xaaaa0000u));
  }
}

TEST_CASE("emulation: threads that ended do not hold up a barrier") {
  std::vector<int> out(64);
  CHECK(run(divergent_exit_kernel, 1, 64, 0, out.data()) == "");
  for (size_t i = 0; i < 64; ++i) CHECK(out[i] == (i % 2 == 0));
}

TEST_CASE("emulation: mistakes of kernels are faults that name the thread") {
  std::vector<int> out(32);
  int* const p = out.data();
  CHECK(says(run(missing_lane_kernel, 1, 32, 0, p), "lane 7, which has ended"));
  CHECK(says(run(missing_lane_kernel, 1, 7, 0, p), "does not exist"));
  CHECK(says(run(diverged_barrier_kernel, 1, 32, 0, p), "deadlock"));
  CHECK(says(run(unlisted_lane_kernel, 1, 32, 0, p), "leaves it out, in thread (1, 0, 0)"));
  CHECK(says(run(outside_mask_kernel, 1, 32, 0, p), "reads lane 9 outside its mask"));
  CHECK(says(run(overrun_kernel, 1, 1, 100, 100), "past the end of dynamic shared memory"));
  alignas(16) float x[8] = {};
  float y = 0;
  CHECK(says(run(unaligned_kernel, 1, 1, 0, static_cast<const float*>(x + 1), &y), "misaligned"));
  CHECK(run(unaligned_kernel, 1, 1, 0, static_cast<const float*>(x + 4), &y) == "");
}

TEST_CASE("emulation: a fault is sticky") {
  int value = 0;
  launch(missing_lane_kernel, 1, 32, 0, nullptr, &value);
  launch(fill_kernel, 1, 1, 0, nullptr, &value, 1, 9);
  CHECK(cudaStreamSynchronize(nullptr) == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  CHECK(value == 0);
  cuda_emulation::clear_fault();
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("emulation: impossible launches set the last error and run nothing") {
  int value = 0;
  const auto launch_of = [&](dim3 grid, dim3 block, size_t shared) {
    launch(fill_kernel, grid, block, shared, nullptr, &value, 1, 9);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    return cudaGetLastError();
  };
  CHECK(launch_of(0, 1, 0) == cudaErrorInvalidConfiguration);
  CHECK(launch_of(dim3(1, 65536), 1, 0) == cudaErrorInvalidConfiguration);
  CHECK(launch_of(1, 1025, 0) == cudaErrorInvalidConfiguration);
  CHECK(launch_of(1, 1, (48 << 10) + 1) == cudaErrorInvalidValue);
  CHECK(value == 0);
  CHECK(cudaFuncSetAttribute(fill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10) ==
        cudaSuccess);
  CHECK(launch_of(1, 1, 60 << 10) == cudaSuccess);
  CHECK(value == 9);
}

TEST_CASE("emulation: memory has a cap, guards and undefined content") {
  size_t free_bytes = 0, total = 0;
  cuda_emulation::set_memory_bytes(1 << 20);
  char* p = nullptr;
  CHECK(cudaMalloc(&p, (1 << 20) + 1) == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  REQUIRE(cudaMalloc(&p, 1000) == cudaSuccess);
  CHECK(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess);
  CHECK(total - free_bytes == 1000);
  CHECK(reinterpret_cast<uintptr_t>(p) % 256 == 0);
  CHECK(static_cast<unsigned char>(p[999]) == 0xff);
  char host[10] = {};
  CHECK(cudaMemcpy(p + 995, host, 10, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(p, host, 10, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(host, host + 5, 5, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(p, host, 10, cudaMemcpyDefault) == cudaSuccess);
  CHECK(cudaFree(p + 1) == cudaErrorInvalidValue);
  p[1000] = 0;
  CHECK(cudaFree(p) == cudaSuccess);
  CHECK(says(cuda_emulation::fault(), "outside an allocation"));
  cuda_emulation::clear_fault();
  CHECK(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess);
  CHECK(free_bytes == total);
  cuda_emulation::set_memory_bytes(size_t{1} << 30);
}

TEST_CASE("emulation: copies of page-locked memory happen later, others at once") {
  cudaStream_t stream;
  cudaEvent_t never_early;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaEventCreateWithFlags(&never_early, cudaEventDisableTiming) == cudaSuccess);
  int *pinned, *device;
  REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
  REQUIRE(cudaMalloc(&device, sizeof(int)) == cudaSuccess);
  *pinned = 5;
  CHECK(cudaMemcpyAsync(device, pinned, sizeof(int), cudaMemcpyHostToDevice, stream) ==
        cudaSuccess);
  CHECK(cudaEventRecord(never_early, stream) == cudaSuccess);
  CHECK(cudaEventSynchronize(never_early) == cudaSuccess);
  CHECK(cudaEventQuery(never_early) == cudaSuccess);
  int back = 0;
  CHECK(cudaMemcpyAsync(&back, device, sizeof(int), cudaMemcpyDeviceToHost, stream) == cudaSuccess);
  CHECK(back == 5);
  CHECK(cudaEventDestroy(never_early) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(cudaFree(device) == cudaSuccess);
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
}

TEST_CASE("emulation: memory mapped for reading is page-locked for reading alone") {
  constexpr size_t kBytes = 4096;
  void* mapped = mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(mapped != MAP_FAILED);
  int* device;
  REQUIRE(cudaMalloc(&device, kBytes) == cudaSuccess);
  const auto copy = [&] {
    const int64_t before = cuda_emulation::pageable_copies();
    CHECK(cudaMemcpy(device, mapped, kBytes, cudaMemcpyHostToDevice) == cudaSuccess);
    return cuda_emulation::pageable_copies() - before;
  };
  CHECK(copy() == 1);
  CHECK(cudaHostRegister(mapped, kBytes, cudaHostRegisterPortable) == cudaErrorInvalidValue);
  CHECK(cudaHostRegister(mapped, kBytes, cudaHostRegisterReadOnly) == cudaSuccess);
  CHECK(copy() == 0);
  CHECK(cudaMemcpy(mapped, device, kBytes, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(cudaHostUnregister(mapped) == cudaSuccess);
  cuda_emulation::lock_for_reading(false);
  CHECK(cudaHostRegister(mapped, kBytes, cudaHostRegisterReadOnly) == cudaErrorNotSupported);
  cuda_emulation::lock_for_reading(true);
  CHECK(cudaFree(device) == cudaSuccess);
  CHECK(munmap(mapped, kBytes) == 0);
  cudaGetLastError();  // taken note of
}

TEST_CASE("emulation: an event orders two streams") {
  cudaStream_t a, b;
  cudaEvent_t done;
  REQUIRE(cudaStreamCreate(&a) == cudaSuccess);
  REQUIRE(cudaStreamCreate(&b) == cudaSuccess);
  REQUIRE(cudaEventCreate(&done) == cudaSuccess);
  for (int round = 0; round < 20; ++round) {
    std::vector<int> x(2000, 0);
    int last = 0;
    launch(fill_kernel, 1, 1, 0, a, x.data(), 2000, round + 1);
    CHECK(cudaEventRecord(done, a) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(b, done) == cudaSuccess);
    launch(add_kernel, 1, 1, 0, b, &last, static_cast<const int*>(x.data() + 1999));
    CHECK(cudaStreamSynchronize(b) == cudaSuccess);
    CHECK(last == round + 1);
  }
  CHECK(cudaEventDestroy(done) == cudaSuccess);
  CHECK(cudaStreamDestroy(a) == cudaSuccess);
  CHECK(cudaStreamDestroy(b) == cudaSuccess);
}

TEST_CASE("emulation: a thread that overlaps with the kernel before and does not wait is a fault") {
  int out[32] = {};
  const auto fault = [&](bool overlaps, unsigned waiting) {
    launch(awaiting_kernel, 3, 32, 0, {nullptr, overlaps}, static_cast<int*>(out), waiting);
    cudaDeviceSynchronize();
    const std::string message = cuda_emulation::fault();
    cuda_emulation::clear_fault();
    return message;
  };
  const int64_t before = cuda_emulation::overlapping_launches();
  CHECK(fault(false, 0).empty());
  CHECK(fault(true, 32).empty());
  CHECK(out[31] == 1);
  CHECK(says(fault(true, 31), "a thread ends that has not waited for the kernel before"));
  CHECK(cuda_emulation::overlapping_launches() == before + 2);
}

TEST_CASE("emulation: a captured graph runs nothing until launched, then what was captured") {
  cudaStream_t stream;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  int total = 0, by = 3;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  launch(add_kernel, 1, 1, 0, stream, &total, static_cast<const int*>(&by));
  launch(add_kernel, 1, 1, 0, stream, &total, static_cast<const int*>(&by));
  CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaGetLastError() == cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&exec, graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(total == 0);
  CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(total == 6);
  by = 10;  // read at the launch, not at the capture
  CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(total == 26);
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

}  // namespace helm::test
