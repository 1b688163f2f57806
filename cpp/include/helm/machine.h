// What the runtime finds on this machine: isas, accelerators, and what it measures of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "helm/format.h"
#include "helm/types.h"

namespace helm {

// One tier of vector kernels.
struct IsaTier {
  std::string name;  // "scalar", "avx2", "avx512", "avx512bf16", "amx"
  bool available;
  std::string reason;  // what makes it available, or what it lacks
};

struct IsaChoice {
  std::string name;
  std::string reason;
};

HELM_API std::vector<IsaTier> isa_tiers();

// The tier that engines use: the best available up to avx512bf16, or the one that HELM_CPU_ISA
// names. Throws Error{kInvalid} if HELM_CPU_ISA names an unknown tier or one the machine lacks.
HELM_API IsaChoice isa_choice();

// The same of products of packed weights, which have tables of their own: "scalar", "avx2",
// "avxvnni", "avx512vnni". HELM_CPU_INT names one, HELM_CPU_ISA bounds the choice.
HELM_API std::vector<IsaTier> integer_isa_tiers();
HELM_API IsaChoice integer_isa_choice();

struct DeviceInfo {
  std::string kind;           // "cpu", "sim" or "cuda"
  std::string name;           // for people, as in "NVIDIA GeForce RTX 4060"
  int64_t memory_bytes = 0;   // in all
  int64_t free_bytes = 0;     // that could still be allocated
  bool locks_mapped = false;  // page-locks memory that is mapped for reading alone, too
};

// An accelerator by its specification:
//   cuda, cuda:N                       GPU N, counted from 0, the first by default; cuBLAS 13 is
//                                      looked for in the folders of $HELM_CUBLAS_DIR and of
//                                      `cublas_directories`, the wheel nvidia-cublas beside this
//                                      library, the CUDA toolkit and the system's libraries
//   sim:vram=2GiB,link=16GB/s,latency=10us,memory=200GB/s,threads=1
//                                      a simulated one of host memory: the memory it may take, the
//                                      speed and latency of its copies, the rate at which stages
//                                      read weights and KV, the threads it computes on
// Opens and closes it. Throws Error{kInvalid} for a malformed specification, with the reason
// Error{kAbsent} where there is no such kind of device, Error{kDevice} when it cannot be had.
HELM_API DeviceInfo accelerator_info(const std::string& specification,
                                     const std::vector<std::string>& cublas_directories = {});

// Touches `bytes` of fresh memory that asks for huge pages, as weights do; how much of it the
// system put on them, nothing where it does not tell. Throws Error{kMemory} when memory is refused.
HELM_API std::optional<int64_t> granted_huge_page_bytes(int64_t bytes);

// Why the system places no memory on this node of the machine, as "Operation not permitted"; empty
// where it does.
HELM_API std::string memory_node_refusal(int node);

// Puts a file with this content where `path` says, whole or not at all; readable by its owner
// alone. What was measured of a machine is kept so. Throws Error{kIo}.
HELM_API void replace_file(const std::string& path, std::string_view content);

// These throw Error{kInvalid} for no threads, or too little memory for so many.
// The most that `threads` read together from `bytes` of memory, bytes/s, trying for `seconds`.
HELM_API double stream_read_bytes_per_s(int threads, int64_t bytes, double seconds);

// The most f32 multiply-adds that `threads` do in registers, counted as two operations, FLOP/s.
HELM_API double fma_flops(int threads, double seconds);

// What one run of an op does, and how long each of several runs took: all of them, and those during
// which every thread kept its core. Only the latter tell what the machine can do when others are
// at work on it too.
struct ProbeTiming {
  double flops = 0;
  double bytes = 0;  // of weights, KV or activations, whichever the probe is about
  std::vector<double> run_s;
  std::vector<double> undisturbed_s;
};

// Times the engine's own stages, kernels and thread pool on synthetic ops of a decoder block. Their
// weights and KV pages lie one after the other in one arena on huge pages, as a model's do, and the
// ops take turns, so that each finds its weights in memory rather than in a cache. Every call runs
// for about `seconds` and returns one timing per shape of op; a block has each shape once. Calls
// must not overlap. Throws Error{kMemory} when memory is refused.
class HELM_API StageProbe {
 public:
  static constexpr int64_t kMinimumBytes = int64_t{1} << 27;  // holds any one op

  // `bytes` should exceed every cache several times. While a probe runs, thread i stays on CPU
  // cpus[i]: left to the system, two threads may share a core for seconds on a busy machine, which
  // says nothing of what the machine can do. Threads beyond `cpus` run anywhere. node: of the
  // memory that the weights of products lie on, -1: where their readers are. It and its members
  // throw Error{kInvalid} for arguments out of range, Error{kMemory} where the system refuses that.
  StageProbe(int64_t bytes, std::vector<int> cpus, int node = -1);
  ~StageProbe();
  StageProbe(const StageProbe&) = delete;
  StageProbe& operator=(const StageProbe&) = delete;

  // Products of `tokens` rows with different matrices of a format, but for bf16c; bytes read of
  // the matrices.
  std::vector<ProbeTiming> matmul(int threads, const Format& format, int64_t tokens,
                                  double seconds);
  // Products of one row with matrices as they lie once copied and, each right after, with others in
  // the pages of a file that is mapped: a timing per shape of the former, then of the latter.
  std::vector<ProbeTiming> mapped_matvec(int threads, DType dtype, double seconds);
  // Products of `tokens` rows with bf16 matrices and, each right after, with others in bf16c: a
  // timing per shape of the former, then of the latter; bytes of both are those of bf16.
  std::vector<ProbeTiming> compressed_matmul(int threads, int64_t tokens, double seconds);
  // Copying from a file in the page cache to fresh memory on huge pages, as weights are loaded, or
  // compressing bf16 weights on the way; bytes read.
  std::vector<ProbeTiming> copy(int threads, double seconds);
  std::vector<ProbeTiming> compress(int threads, double seconds);
  // Attention of the last `queries` of `context` positions of a sequence, `group` query heads per
  // KV head; bytes of the KV read, FLOPs of the pairs that causality allows.
  std::vector<ProbeTiming> attention(int threads, DType dtype, int64_t kv_heads, int64_t group,
                                     int64_t queries, int64_t context, double seconds);
  // Norms and a gated activation; bytes read and written.
  std::vector<ProbeTiming> elementwise(int threads, int64_t tokens, double seconds);
  // A stage of `ops` that have no work: dispatch and barrier.
  std::vector<ProbeTiming> empty_ops(int threads, int64_t ops, double seconds);
  // A stage of `ops`, a multiple of 3, with little work, each on one token's row that the threads
  // wrote in the op before: what dispatch, barrier and other threads' caches cost.
  std::vector<ProbeTiming> handovers(int threads, int64_t ops, double seconds);

 private:
  class HELM_LOCAL Impl;
  std::unique_ptr<Impl> impl_;
};

// Times an accelerator and its link on the same synthetic ops, through what the engine uses of it.
// Runs are enqueued one after the other and awaited together, so that what the host adds to each is
// hidden as far as it is in the engine; `run_s` are means over batches of runs, `undisturbed_s`
// those near the quickest. Every call runs for about `seconds`. Calls must not overlap. Throws
// Error{kInvalid} in a forked child.
class HELM_API DeviceProbe {
 public:
  // See accelerator_info() for specifications, cuBLAS and errors. Takes `bytes` of the device's
  // memory, at least kMinimumBytes, for weights and KV, and less than that again for buffers;
  // throws Error{kMemory} where it is not to be had.
  static constexpr int64_t kMinimumBytes = int64_t{1} << 28;
  DeviceProbe(const std::string& specification, int64_t bytes,
              const std::vector<std::string>& cublas_directories = {});
  ~DeviceProbe();
  DeviceProbe(const DeviceProbe&) = delete;
  DeviceProbe& operator=(const DeviceProbe&) = delete;

  // Products of `tokens` rows with different matrices; bytes of the matrices.
  ProbeTiming matmul(const Format& format, int64_t tokens, double seconds);
  // Attention as StageProbe's.
  ProbeTiming attention(DType dtype, int64_t group, int64_t queries, int64_t context,
                        double seconds);
  // Norms and a gated activation; bytes read and written.
  ProbeTiming elementwise(int64_t tokens, double seconds);
  // A stage of `ops` that have no work.
  ProbeTiming empty_ops(int64_t ops, double seconds);
  // A stage without ops that the host waits for each time; with `crossings`, after a copy of one
  // token's activations to the device and before a copy back.
  ProbeTiming empty_step(bool crossings, double seconds);
  // One large copy from or to page-locked or other host memory.
  ProbeTiming copy(bool to_device, bool page_locked, double seconds);
  // So many small copies to the device, each enqueued behind the one before.
  ProbeTiming queued_copies(int64_t copies, double seconds);

 private:
  class HELM_LOCAL Impl;
  HELM_LOCAL Impl& used() const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace helm
