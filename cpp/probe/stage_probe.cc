// Times the engine's own stages on the CPU, on synthetic ops.
#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "base/affinity.h"
#include "base/arena.h"
#include "base/check.h"
#include "base/memory_node.h"
#include "cpu/compression.h"
#include "cpu/isa.h"
#include "helm/machine.h"
#include "probe/cached_file.h"
#include "probe/synthetic.h"
#include "probe/timed_stages.h"

namespace helm {
namespace {

using namespace probe;  // the synthetic stages, and how they are timed

constexpr int64_t kWholeBlockTokens = 16;
constexpr double kRoundFlops = 4e9;  // of all stages of a call, unless one has more: some 10 ms
// Copied in one run: beyond most caches, which would otherwise keep what the next run writes again.
constexpr int64_t kCopyBytes = StageProbe::kMinimumBytes / 2;
constexpr int64_t kCopyPiece = int64_t{4} << 20;  // as the engine reads 16-bit weights

// Times a stage of one token that finds everything in caches.
std::vector<ProbeTiming> time_small(std::shared_ptr<Synthetic> s, Cpu& cpu, double seconds) {
  s->compile(1, 1);
  std::vector<ProbeTiming> timings(1);
  time_all({{std::move(s), 0}}, timings, cpu, seconds);
  return timings;
}

// Few tokens: the products of a block. Many: its smallest, short enough to finish undisturbed more
// often than not, with rows enough that many pieces share the reading of the input, as in the
// others (a product of 256 rows measured an eighth to a quarter slower).
std::vector<ProductShape> product_shapes(int64_t tokens) {
  if (tokens > kWholeBlockTokens) return {{kHidden, kHidden, 1}};
  return {block_products().begin(), block_products().end()};
}

ProbeTiming timing_of(const Work& work) {
  return {work.flops, work.bytes, {}, {}};
}

// Adds a stage of one product with a matrix of its own.
Work add_product(Cpu& cpu, Slices& slices, const ProductShape& shape, const Format& format,
                 int64_t tokens, size_t timing, std::vector<Timed>& stages) {
  auto s = std::make_shared<Synthetic>(cpu.account, slices, cpu.fill_noise);
  const ValueIndex in = s->value(shape.cols);
  const ValueIndex out = s->value(shape.rows);
  const Work work = s->add_product(in, out, shape, format, tokens);
  s->compile(tokens, tokens);
  stages.push_back({std::move(s), timing});
  return work;
}

// Whether stages that take so many operations, one run of each, are enough for a round.
bool enough(const Slices& slices, int64_t tokens, double flops) {
  return slices.enough() || (tokens > kWholeBlockTokens && flops >= kRoundFlops);
}

// Half of what the probe has of copied weights: as much as a call reads of those.
struct MappedWeights {
  MappedWeights(int64_t bytes, ThreadPool& pool)
      : file(bytes), slices(cpu::device_address(file.data()), bytes) {
    fill(file.data(), bytes, pool);
  }

  CachedFile file;
  Slices slices;
  int64_t copied_to = 0;  // where the next copy begins
};

void check(bool ok, const char* rule) {
  if (!ok) fail(ErrorKind::kInvalid, "[probe] expected ", rule);
}

void check_tokens(int threads, int64_t tokens) {
  check(threads >= 1 && tokens >= 1 && tokens <= kMostTokens,
        "1 to 4096 tokens on a thread or more");
}

}  // namespace

class StageProbe::Impl {
 public:
  Impl(int64_t bytes, std::vector<int> cpus, int node)
      : cpus_(std::move(cpus)),
        arena_(bytes, "the probe"),
        slices_(cpu::device_address(arena_.data()), bytes) {
    const int error = node == kAnyNode ? 0 : bind_memory(arena_.data(), arena_.bytes(), node);
    if (error != 0) {
      fail(ErrorKind::kMemory, "[probe] no memory on node ", node, ": ",
           std::generic_category().message(error));
    }
    const PinnedThread pinned(first_cpu());
    fill(arena_.data(), bytes, cpu(std::max<int>(1, static_cast<int>(cpus_.size()))).pool);
  }
  Slices& slices() {
    slices_.start();
    return slices_;
  }
  // Kept from call to call, as an engine keeps its own.
  Cpu& cpu(int threads) {
    if (cpu_ == nullptr || cpu_->pool.size() != threads) {
      cpu_ = std::make_unique<Cpu>(threads);
      cpu_->pool.run([&](Team& team) {
        const auto worker = static_cast<size_t>(team.worker());
        if (worker > 0 && worker < cpus_.size()) pin_thread(cpus_[worker]);
      });
    }
    return *cpu_;
  }
  // Of the calling thread, for as long as a call measures: not once per run, as that takes time.
  int first_cpu() const { return cpus_.empty() ? -1 : cpus_[0]; }
  // Made when first asked for, both.
  Slices& compressed(ThreadPool& pool) {
    if (!compressed_.data()) {
      const int64_t bytes = slices_.half();
      compressed_ = Arena(bytes, "the probe");
      fill(compressed_.data(), bytes, pool);
      compressed_slices_ = Slices(cpu::device_address(compressed_.data()), bytes);
    }
    return compressed_slices_;
  }
  MappedWeights& mapped(ThreadPool& pool) {
    if (mapped_ == nullptr) mapped_ = std::make_unique<MappedWeights>(slices_.half(), pool);
    return *mapped_;
  }
  // Brings pieces of a file in the page cache to fresh memory: bring(file, offset, to) the one of
  // kCopyPiece bytes at an offset, or false.
  template <typename Bring>
  std::vector<ProbeTiming> time_loading(int threads, double seconds, const Bring& bring) {
    check(threads >= 1, "a thread or more");
    const Clock::time_point start = Clock::now();
    Cpu& team = cpu(threads);
    const PinnedThread pinned(first_cpu());
    MappedWeights& from = mapped(team.pool);
    std::vector<ProbeTiming> timings{{0, static_cast<double>(kCopyBytes), {}, {}}};
    std::atomic<bool> failed{false};
    do {
      if (from.copied_to + kCopyBytes > from.file.bytes()) from.copied_to = 0;
      const Arena fresh(kCopyBytes, "the probe");
      time_run(team, timings[0], [&] {
        team.pool.run([&](Team& member) {
          member.parallel_for(kCopyBytes / kCopyPiece, 1, [&](int64_t piece, int64_t) {
            const int64_t offset = piece * kCopyPiece;
            if (!bring(from.file, from.copied_to + offset, fresh.data() + offset)) failed = true;
          });
        });
      });
      if (failed) fail(ErrorKind::kIo, "[probe] a file in memory could not be loaded");
      from.copied_to += kCopyBytes;
    } while (since(start) < seconds);
    return timings;
  }

 private:
  std::vector<int> cpus_;
  Arena arena_;
  Slices slices_;
  Arena compressed_;
  Slices compressed_slices_{DeviceAddress::kNull, 0};
  std::unique_ptr<MappedWeights> mapped_;
  std::unique_ptr<Cpu> cpu_;
};

StageProbe::StageProbe(int64_t bytes, std::vector<int> cpus, int node)
    : impl_(std::make_unique<Impl>(std::max(bytes, kMinimumBytes), std::move(cpus), node)) {}
StageProbe::~StageProbe() = default;

std::vector<ProbeTiming> StageProbe::matmul(int threads, const Format& format, int64_t tokens,
                                            double seconds) {
  check_tokens(threads, tokens);
  check(format.codes != Codes::kBF16C, "another format than bf16c, which has a probe of its own");
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  Slices& slices = impl_->slices();
  const std::vector<ProductShape> shapes = product_shapes(tokens);
  std::vector<ProbeTiming> timings(shapes.size());
  std::vector<Timed> stages;
  double flops = 0;
  do {
    for (size_t i = 0; i < shapes.size(); ++i) {
      timings[i] = timing_of(add_product(cpu, slices, shapes[i], format, tokens, i, stages));
      flops += timings[i].flops;
    }
  } while (!enough(slices, tokens, flops));
  time_all(stages, timings, cpu, seconds);
  return timings;
}

namespace {

// Products of so many rows with weights of the first kind and, each right after, of the second: a
// timing per shape of the one, then of the other. bytes of both: those of the first.
std::vector<ProbeTiming> in_turn(Cpu& cpu, Slices& first, const Format& format, Slices& second,
                                 const Format& other, int64_t tokens, double seconds) {
  const std::vector<ProductShape> shapes = product_shapes(tokens);
  const size_t count = shapes.size();
  std::vector<ProbeTiming> timings(2 * count);
  std::vector<Timed> stages;
  double flops = 0;
  do {
    for (size_t i = 0; i < count; ++i) {
      timings[i] = timing_of(add_product(cpu, first, shapes[i], format, tokens, i, stages));
      timings[count + i] =
          timing_of(add_product(cpu, second, shapes[i], other, tokens, count + i, stages));
      timings[count + i].bytes = timings[i].bytes;
      flops += timings[i].flops + timings[count + i].flops;
    }
  } while (!enough(first, tokens, flops));
  time_all(stages, timings, cpu, seconds);
  return timings;
}

}  // namespace

std::vector<ProbeTiming> StageProbe::mapped_matvec(int threads, DType dtype, double seconds) {
  check(threads >= 1, "a thread or more");
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  Slices& mapped = impl_->mapped(cpu.pool).slices;
  const Format format = format_of(dtype);
  return in_turn(cpu, impl_->slices(), format, mapped, format, 1, seconds);
}

std::vector<ProbeTiming> StageProbe::compressed_matmul(int threads, int64_t tokens,
                                                       double seconds) {
  check_tokens(threads, tokens);
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  Slices& compressed = impl_->compressed(cpu.pool);
  return in_turn(cpu, impl_->slices(), format_of(DType::kBF16), compressed, {Codes::kBF16C}, tokens,
                 seconds);
}

std::vector<ProbeTiming> StageProbe::copy(int threads, double seconds) {
  const auto read = [](const CachedFile& file, int64_t offset, std::byte* to) {
    return file.read(to, kCopyPiece, offset);
  };
  return impl_->time_loading(threads, seconds, read);
}

std::vector<ProbeTiming> StageProbe::compress(int threads, double seconds) {
  constexpr int64_t kCols = 2048, kRows = kCopyPiece / kCols / int64_t{sizeof(uint16_t)};
  static_assert(cpu::CompressedMatrix::bytes(kRows, kCols) < kCopyPiece);
  const cpu::KernelTable& kernels = cpu::select_kernels();
  const auto compress = [&](const CachedFile& file, int64_t offset, std::byte* to) {
    std::vector<uint16_t> plain(kRows * kCols);
    if (!file.read(reinterpret_cast<std::byte*>(plain.data()), kCopyPiece, offset)) return false;
    cpu::Compression compression(to, kRows, kCols);
    bool fits = true;
    for (int64_t r = 0; r < kRows; ++r) {
      fits = compression.put(kernels, r, plain.data() + r * kCols) && fits;
    }
    return fits;
  };
  return impl_->time_loading(threads, seconds, compress);
}

std::vector<ProbeTiming> StageProbe::attention(int threads, DType dtype, int64_t kv_heads,
                                               int64_t group, int64_t queries, int64_t context,
                                               double seconds) {
  check(threads >= 1 && kv_heads >= 1 && kv_heads <= kMostKvHeads && group >= 1 &&
            group <= kMostGroup && queries >= 1 && context >= queries && context <= kMostTokens,
        "1 to 32 KV heads, 1 to 64 query heads of each, and 1 <= queries <= context <= 4096 on a "
        "thread or more");
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  Slices& slices = impl_->slices();
  auto s = std::make_shared<Synthetic>(cpu.account, slices, cpu.fill_noise);
  // Decode reads other pages in each run, as in each layer of an engine.
  const int64_t runs = queries > 1 ? 1 : slices.caches(dtype, kv_heads, context);
  const int64_t pages = s->cache(dtype, runs, kv_heads, context);
  const ValueIndex qkv = s->value((group + 2) * kv_heads * kHeadDim);
  const ValueIndex out = s->value(group * kv_heads * kHeadDim);
  std::vector<ProbeTiming> timings{timing_of(s->add_attention(qkv, out, group, queries, context))};
  s->compile(queries, context);
  std::vector<Timed> stages;
  for (int64_t i = 0; i < runs; ++i) stages.push_back({s, 0, i * pages});
  time_all(stages, timings, cpu, seconds);
  return timings;
}

std::vector<ProbeTiming> StageProbe::elementwise(int threads, int64_t tokens, double seconds) {
  check_tokens(threads, tokens);
  constexpr int kTurns = 2;  // values of one are rarely in caches when its turn comes again
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  std::vector<ProbeTiming> timings;
  std::vector<Timed> stages;
  for (int i = 0; i < kTurns; ++i) {
    auto s = std::make_shared<Synthetic>(cpu.account, impl_->slices(), cpu.fill_noise);
    timings = {timing_of(s->add_elementwise(tokens))};
    s->compile(tokens, tokens);
    stages.push_back({std::move(s), 0});
  }
  time_all(stages, timings, cpu, seconds);
  return timings;
}

std::vector<ProbeTiming> StageProbe::empty_ops(int threads, int64_t ops, double seconds) {
  check(threads >= 1 && ops >= 0 && ops <= kMostTokens, "0 to 4096 ops on a thread or more");
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  auto s = std::make_shared<Synthetic>(cpu.account, impl_->slices(), cpu.fill_noise);
  s->add_empty_ops(ops);
  return time_small(std::move(s), cpu, seconds);
}

std::vector<ProbeTiming> StageProbe::handovers(int threads, int64_t ops, double seconds) {
  check(threads >= 1 && ops >= kHandovers && ops <= kMostTokens && ops % kHandovers == 0,
        "a multiple of 3 ops, 3 to 4096, on a thread or more");
  Cpu& cpu = impl_->cpu(threads);
  const PinnedThread pinned(impl_->first_cpu());
  auto s = std::make_shared<Synthetic>(cpu.account, impl_->slices(), cpu.fill_noise);
  s->add_handovers(ops);
  return time_small(std::move(s), cpu, seconds);
}

}  // namespace helm
