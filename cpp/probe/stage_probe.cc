// Builds synthetic plans (shapes of a decoder block, weights that are generated) and times the
// engine's own stages on them.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/arena.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "helm/machine.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What one thread has used and what has passed.
struct Clocks {
  double cpu_s = 0;
  double wall_s = 0;

  static Clocks now() {
    timespec cpu{}, wall{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);  // exact only for the calling thread
    clock_gettime(CLOCK_MONOTONIC, &wall);
    return {seconds(cpu), seconds(wall)};
  }

 private:
  static double seconds(const timespec& t) {
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
};

// The block whose ops are timed: grouped-query attention and a gated MLP of common proportions.
constexpr int64_t kHidden = 1536;
constexpr int64_t kInner = 4096;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kGroup = 4;  // query heads per KV head
constexpr int64_t kHeadDim = 128;
constexpr int64_t kQkv = (kGroup + 2) * kKvHeads * kHeadDim;
constexpr int64_t kPageTokens = 512;
constexpr double kUndisturbed = 0.9;  // share of its time that the least served thread ran
constexpr int64_t kEmptyWidth = 16;
constexpr int64_t kWholeBlockTokens = 16;
constexpr int64_t kMostTokens = 4096;
constexpr int64_t kColdTokens = 256;  // above, reading the weights takes no noticeable share
constexpr size_t kComputeBoundStages = 2;
constexpr int64_t kRowsPerThread = 128;  // two pieces of a prefill product

// Random normal numbers in every dtype at once: as f16 of magnitude 1 to 1.5, as bf16 and f32 of
// 2^-7 to 2^-3.
void fill(std::byte* to, int64_t bytes, ThreadPool& threads) {
  std::vector<uint16_t> tile(size_t{1} << 19);
  uint64_t state = 88172645463325252u;
  for (uint16_t& word : tile) {  // xorshift (Marsaglia 2003)
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    word = static_cast<uint16_t>(0x3C00u | (state & 0x81FFu));
  }
  const auto tile_bytes = static_cast<int64_t>(tile.size() * sizeof(uint16_t));
  const int64_t tiles = (bytes + tile_bytes - 1) / tile_bytes;
  threads.run([&](Team& team) {
    team.parallel_for(tiles, 1, [&](int64_t begin, int64_t) {
      const int64_t offset = begin * tile_bytes;
      std::memcpy(to + offset, tile.data(),
                  static_cast<size_t>(std::min(tile_bytes, bytes - offset)));
    });
  });
}

// Consecutive slices of the probe's memory, wrapping around: each op gets other matrices than those
// before it, as in the engine's arena. One call uses half of the memory, the next the other half.
class Slices {
 public:
  Slices(std::byte* memory, int64_t bytes) : memory_(memory), bytes_(bytes) {}
  std::byte* next(int64_t bytes) {
    if (bytes > bytes_) fail(ErrorKind::kInvalid, "[probe] an op exceeds the probe's memory");
    if (at_ + bytes > bytes_) at_ = 0;
    taken_ += bytes;
    return memory_ + std::exchange(at_, align_up(at_ + bytes, kCacheLine));
  }
  // Bytes handed out since the last call of start().
  void start() { taken_ = 0; }
  bool enough() const { return taken_ >= bytes_ / 2; }

 private:
  std::byte* memory_;
  int64_t bytes_;
  int64_t at_ = 0;
  int64_t taken_ = 0;
};

DeviceAddress address_of(const std::byte* memory) {
  return static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(memory));
}

// A plan of one unit under construction, then a stage that can be timed.
class Synthetic {
 public:
  explicit Synthetic(Slices& slices) : slices_(slices) { plan.units.resize(1); }

  ValueIndex value(int64_t width) {
    plan.values.push_back({"", width, false});
    return static_cast<ValueIndex>(plan.values.size() - 1);
  }
  TensorIndex tensor(std::vector<int64_t> shape, DType dtype) {
    TensorSpec spec;
    spec.shape = std::move(shape);
    spec.dtype = dtype;
    weights_.push_back(address_of(slices_.next(spec.bytes())));
    plan.tensors.push_back(std::move(spec));
    return static_cast<TensorIndex>(plan.tensors.size() - 1);
  }
  void add(Op op) { plan.units[0].ops.push_back(std::move(op)); }
  void pages(int64_t bytes) { pages_ = address_of(slices_.next(bytes)); }

  // Compiles the stage for the last `queries` of `context` positions.
  void compile(int64_t queries, int64_t context, ThreadPool& pool);
  void time(ThreadPool& pool, ProbeTiming& timing) const;

  Plan plan;

 private:
  Slices& slices_;
  std::vector<DeviceAddress> weights_;  // by TensorIndex
  DeviceAddress pages_ = DeviceAddress::kNull;
  std::vector<int32_t> tokens_, positions_, page_table_;
  SequenceRun sequence_{};
  StepView step_;
  Arena buffers_;  // values, then the workspace
  std::unique_ptr<cpu::CpuStage> stage_;
};

void Synthetic::compile(int64_t queries, int64_t context, ThreadPool& pool) {
  plan.limits = {context, queries, queries, 1};
  const cpu::KernelTable& kernels = cpu::select_kernels();
  const int64_t scratch = cpu::CpuStage::workspace_bytes(plan, plan.units, kernels, pool.size());
  int64_t bytes = 0;
  std::vector<int64_t> offsets;
  for (const ValueSpec& value : plan.values) {
    offsets.push_back(bytes);
    bytes = align_up(bytes + queries * value.width * int64_t{sizeof(float)}, kCacheLine);
  }
  buffers_ = Arena(bytes + scratch, "the probe");
  fill(buffers_.data(), bytes, pool);
  StageSpec spec{&plan, plan.units, weights_, {}, pages_, address_of(buffers_.data() + bytes)};
  for (const int64_t offset : offsets) {
    spec.values.push_back(address_of(buffers_.data() + offset));
  }
  stage_ = std::make_unique<cpu::CpuStage>(spec, kernels, pool);
  tokens_.assign(static_cast<size_t>(queries), 0);
  for (int64_t i = 0; i < queries; ++i) {
    positions_.push_back(static_cast<int32_t>(context - queries + i));
  }
  for (int32_t i = 0; i < plan.kv.pages; ++i) page_table_.push_back(i);
  sequence_ = {0, queries, context - queries, page_table_.data()};
  step_ = {tokens_, positions_, {}, {&sequence_, 1}};
}

void Synthetic::time(ThreadPool& pool, ProbeTiming& timing) const {
  std::vector<Clocks> before(static_cast<size_t>(pool.size()));
  std::vector<Clocks> after(before.size());
  pool.run([&](Team& team) { before[static_cast<size_t>(team.worker())] = Clocks::now(); });
  const Clock::time_point start = Clock::now();
  stage_->run(step_);
  timing.run_s.push_back(since(start));
  pool.run([&](Team& team) { after[static_cast<size_t>(team.worker())] = Clocks::now(); });
  double busy = 1;
  for (size_t i = 0; i < before.size(); ++i) {
    busy =
        std::min(busy, (after[i].cpu_s - before[i].cpu_s) / (after[i].wall_s - before[i].wall_s));
  }
  if (busy >= kUndisturbed) timing.undisturbed_s.push_back(timing.run_s.back());
}

// A stage, and which timing its runs belong to.
struct Timed {
  std::unique_ptr<Synthetic> stage;
  size_t timing;
};

// Runs the stages in turn for `seconds`, at least one round after an unrecorded one that touches
// their buffers. If the threads never had their cores in the first, its times are all there is:
// better come back later.
void time_all(const std::vector<Timed>& stages, std::vector<ProbeTiming>& timings, ThreadPool& pool,
              double seconds) {
  const Clock::time_point start = Clock::now();
  std::vector<ProbeTiming> first = timings;
  for (const Timed& timed : stages) timed.stage->time(pool, first[timed.timing]);
  if (std::all_of(first.begin(), first.end(),
                  [](const ProbeTiming& t) { return t.undisturbed_s.empty(); })) {
    timings = std::move(first);
    return;
  }
  for (bool whole_round = false; !whole_round || since(start) < seconds; whole_round = true) {
    for (const Timed& timed : stages) {
      timed.stage->time(pool, timings[timed.timing]);
      if (whole_round && since(start) >= seconds) return;
    }
  }
}

struct LinearShape {
  int64_t rows;
  int64_t cols;
  int parts;
};

// Few tokens: the products of a block. Many: enough rows to occupy all threads, few enough that a
// product is short and finishes undisturbed more often than not.
std::vector<LinearShape> linear_shapes(int64_t tokens, int threads) {
  if (tokens <= kWholeBlockTokens) {
    return {
        {kQkv, kHidden, 3}, {kHidden, kHidden, 1}, {2 * kInner, kHidden, 2}, {kHidden, kInner, 1}};
  }
  return {{kRowsPerThread * threads, kHidden, 1}};
}

void check(bool ok, const char* rule) {
  if (!ok) fail(ErrorKind::kInvalid, "[probe] expected ", rule);
}

// Keeps the calling thread on one CPU while in scope, as far as the system allows.
class Pinned {
 public:
  explicit Pinned(const std::vector<int>& cpus) {
#if defined(__linux__)
    if (cpus.empty()) return;
    restore_ = sched_getaffinity(0, sizeof(before_), &before_) == 0;
    pin(cpus[0]);
#endif
  }
#if defined(__linux__)
  ~Pinned() {
    if (restore_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    sched_setaffinity(0, sizeof(set), &set);
  }
#else
  static void pin(int) {}
#endif
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t before_{};
  bool restore_ = false;
#endif
};

}  // namespace

class StageProbe::Impl {
 public:
  Impl(int64_t bytes, std::vector<int> cpus)
      : cpus_(std::move(cpus)), arena_(bytes, "the probe"), slices_(arena_.data(), bytes) {
    fill(arena_.data(), bytes, pool(std::max<int>(1, static_cast<int>(cpus_.size()))));
  }
  Slices& slices() {
    slices_.start();
    return slices_;
  }
  // Kept from call to call, as an engine keeps its own.
  ThreadPool& pool(int threads) {
    if (pool_ == nullptr || pool_->size() != threads) {
      pool_ = std::make_unique<ThreadPool>(threads);
      pool_->run([&](Team& team) {
        const auto worker = static_cast<size_t>(team.worker());
        if (worker > 0 && worker < cpus_.size()) Pinned::pin(cpus_[worker]);
      });
    }
    return *pool_;
  }
  const std::vector<int>& cpus() const { return cpus_; }

 private:
  std::vector<int> cpus_;
  Arena arena_;
  Slices slices_;
  std::unique_ptr<ThreadPool> pool_;
};

StageProbe::StageProbe(int64_t bytes, std::vector<int> cpus)
    : impl_(std::make_unique<Impl>(std::max(bytes, kMinimumBytes), std::move(cpus))) {}
StageProbe::~StageProbe() = default;

std::vector<ProbeTiming> StageProbe::matmul(int threads, DType dtype, int64_t tokens,
                                            double seconds) {
  check(threads >= 1 && tokens >= 1 && tokens <= kMostTokens,
        "1 to 4096 tokens on a thread or more");
  ThreadPool& pool = impl_->pool(threads);
  const Pinned pinned(impl_->cpus());
  Slices& slices = impl_->slices();
  std::vector<ProbeTiming> timings;
  std::vector<Timed> stages;
  for (const LinearShape& shape : linear_shapes(tokens, threads)) {
    const auto elements = static_cast<double>(shape.rows * shape.cols);
    timings.push_back({2 * elements * static_cast<double>(tokens),
                       elements * static_cast<double>(dtype_bytes(dtype)),
                       {},
                       {}});
  }
  const auto add = [&](const LinearShape& shape, size_t timing) {
    auto s = std::make_unique<Synthetic>(slices);
    const ValueIndex in = s->value(shape.cols);
    const ValueIndex out = s->value(shape.rows);
    LinearOp op{in, out, {}, false};
    for (int i = 0; i < shape.parts; ++i) {
      op.parts.push_back({s->tensor({shape.rows / shape.parts, shape.cols}, dtype), kNoTensor});
    }
    s->add(std::move(op));
    s->compile(tokens, tokens, pool);
    stages.push_back({std::move(s), timing});
  };
  const std::vector<LinearShape> shapes = linear_shapes(tokens, threads);
  if (tokens > kColdTokens) {
    while (stages.size() < kComputeBoundStages) add(shapes[0], 0);
  } else {
    do {
      for (size_t i = 0; i < shapes.size(); ++i) add(shapes[i], i);
    } while (!slices.enough());
  }
  time_all(stages, timings, pool, seconds);
  return timings;
}

std::vector<ProbeTiming> StageProbe::attention(int threads, DType dtype, int64_t queries,
                                               int64_t context, double seconds) {
  check(threads >= 1 && queries >= 1 && context >= queries && context <= kMostTokens,
        "1 <= queries <= context <= 4096 on a thread or more");
  ThreadPool& pool = impl_->pool(threads);
  const Pinned pinned(impl_->cpus());
  Slices& slices = impl_->slices();
  // Prefill is bound by arithmetic: no more heads, and none larger, than keep all threads busy.
  const int64_t kv_heads = queries > 1 ? threads : kKvHeads;
  const int64_t heads = kv_heads * (queries > 1 ? kGroup / 2 : kGroup);
  const int64_t blocks = (context + kPageTokens - 1) / kPageTokens;
  const KvSpec kv{dtype, kPageTokens, 1, kv_heads, kHeadDim, blocks};
  const auto n = static_cast<double>(queries);
  const double pairs = n * static_cast<double>(context - queries) + n * (n + 1) / 2;
  std::vector<ProbeTiming> timings{
      {4.0 * static_cast<double>(heads * kHeadDim) * pairs,
       static_cast<double>(2 * context * kv_heads * kHeadDim * dtype_bytes(dtype)),
       {},
       {}}};
  std::vector<Timed> stages;
  do {
    auto s = std::make_unique<Synthetic>(slices);
    s->plan.kv = kv;
    s->pages(kv.pages * kv.page_bytes());
    const ValueIndex qkv = s->value((heads + 2 * kv_heads) * kHeadDim);
    const ValueIndex out = s->value(heads * kHeadDim);
    s->add(AttentionOp{qkv, 0, heads * kHeadDim, (heads + kv_heads) * kHeadDim, out, 0, heads,
                       kv_heads, kHeadDim, 0.088F, 0});
    s->compile(queries, context, pool);
    stages.push_back({std::move(s), 0});
  } while (queries == 1 && !slices.enough());
  time_all(stages, timings, pool, seconds);
  return timings;
}

std::vector<ProbeTiming> StageProbe::elementwise(int threads, int64_t tokens, double seconds) {
  check(threads >= 1 && tokens >= 1 && tokens <= kMostTokens,
        "1 to 4096 tokens on a thread or more");
  ThreadPool& pool = impl_->pool(threads);
  const Pinned pinned(impl_->cpus());
  Slices& slices = impl_->slices();
  auto s = std::make_unique<Synthetic>(slices);
  const ValueIndex x = s->value(kHidden);
  const ValueIndex h = s->value(kHidden);
  const ValueIndex gate_up = s->value(2 * kInner);
  const ValueIndex inner = s->value(kInner);
  const TensorIndex weight = s->tensor({kHidden}, DType::kF32);
  s->add(NormOp{false, x, 0, h, 0, 1, kHidden, weight, kNoTensor, 1e-6F});
  s->add(NormOp{false, x, 0, h, 0, 1, kHidden, weight, kNoTensor, 1e-6F});
  s->add(ActivationOp{ActivationKind::kSilu, true, gate_up, inner, kInner});
  s->compile(tokens, tokens, pool);
  const int64_t floats = tokens * (4 * kHidden + 3 * kInner);
  std::vector<ProbeTiming> timings{{0, static_cast<double>(floats) * sizeof(float), {}, {}}};
  std::vector<Timed> stages;
  stages.push_back({std::move(s), 0});
  time_all(stages, timings, pool, seconds);
  return timings;
}

std::vector<ProbeTiming> StageProbe::empty_ops(int threads, int64_t ops, double seconds) {
  check(threads >= 1 && ops >= 0 && ops <= kMostTokens, "0 to 4096 ops on a thread or more");
  ThreadPool& pool = impl_->pool(threads);
  const Pinned pinned(impl_->cpus());
  Slices& slices = impl_->slices();
  auto s = std::make_unique<Synthetic>(slices);
  const ValueIndex x = s->value(kEmptyWidth);
  const TensorIndex weight = s->tensor({kEmptyWidth}, DType::kF32);
  for (int64_t i = 0; i < ops; ++i) {
    s->add(NormOp{false, x, 0, x, 0, 1, kEmptyWidth, weight, kNoTensor, 1e-6F});
  }
  s->compile(1, 1, pool);
  std::vector<ProbeTiming> timings(1);
  std::vector<Timed> stages;
  stages.push_back({std::move(s), 0});
  time_all(stages, timings, pool, seconds);
  return timings;
}

}  // namespace helm
