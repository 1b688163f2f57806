// Times an accelerator and its link through the device interface, on synthetic ops. Knows no kind
// of device.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "base/process.h"
#include "device/registry.h"
#include "helm/machine.h"
#include "probe/synthetic.h"

namespace helm {
namespace {

using namespace probe;  // the synthetic stages

using Clock = std::chrono::steady_clock;

constexpr double kBatch_s = 2e-3;  // well above what starting and awaiting a batch takes
constexpr int64_t kMostRuns = 1024;
constexpr double kNearQuickest = 1.2;
constexpr int64_t kCopyBytes = int64_t{1} << 24;
constexpr int64_t kSmallCopyBytes = int64_t{1} << 12;
constexpr int64_t kWholeBlockTokens = 16;

// A device whose product of 64 tokens takes longer is kept busy by less work than a GPU.
constexpr double kWide_s = 5e-4;
constexpr int64_t kWideTokens = 64;
constexpr int64_t kWideKvHeads = 8;
constexpr ProductShape kNarrow = {512, kHidden, 1};
constexpr double kNarrowFlops = 2e9;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check(bool ok, const char* rule) {
  if (!ok) fail(ErrorKind::kInvalid, "[probe] expected ", rule);
}

void add(Work& sum, const Work& work) {
  sum.flops += work.flops;
  sum.bytes += work.bytes;
}

}  // namespace

class DeviceProbe::Impl {
 public:
  const Process process;

  Impl(const std::string& specification, int64_t bytes,
       const std::vector<std::string>& cublas_directories)
      : device_(open_accelerator(specification, cublas_directories)),
        account_(*device_, int64_t{1} << 60),
        host_account_(*device_, int64_t{1} << 60),
        memory_(account_, bytes, "the probe"),
        slices_(memory_.address(), bytes),
        stream_(device_->create_stream()),
        pinned_(host_account_, *device_, kCopyBytes, "the probe"),
        pageable_(static_cast<size_t>(kCopyBytes)) {
    const auto tile = static_cast<int64_t>(noise().size() * sizeof(uint16_t));
    for (int64_t at = 0; at < kCopyBytes; at += tile) {
      std::memcpy(pinned_.data() + at, noise().data(), static_cast<size_t>(tile));
      std::memcpy(pageable_.data() + at, noise().data(), static_cast<size_t>(tile));
    }
    fill_(memory_.address(), bytes);
    wide_ = narrow_products(format_of(DType::kBF16), kWideTokens, 0).run_s[0] < kWide_s;
  }

  ProbeTiming matmul(const Format& format, int64_t tokens, double seconds) {
    if (!wide_ && tokens > kWholeBlockTokens) return narrow_products(format, tokens, seconds);
    Synthetic stage = synthetic();
    Work work;
    const ValueIndex hidden = stage.value(kHidden);
    const ValueIndex inner = stage.value(kInner);
    do {
      for (const ProductShape& shape : block_products()) {
        const ValueIndex in = shape.cols == kHidden ? hidden : inner;
        add(work, stage.add_product(in, stage.value(shape.rows), shape, format, tokens));
      }
    } while (!slices_.enough());
    return time_stage(stage, tokens, tokens, work, seconds);
  }

  ProbeTiming attention(DType dtype, int64_t group, int64_t queries, int64_t context,
                        double seconds) {
    Synthetic stage = synthetic();
    const int64_t kv_heads = wide_ ? kWideKvHeads : kKvHeads;
    // Decode reads other pages in each run, as in each layer of an engine.
    const int64_t caches = queries > 1 ? 1 : slices_.caches(dtype, kv_heads, context);
    const int64_t pages = stage.cache(dtype, caches, kv_heads, context);
    const ValueIndex qkv = stage.value((group + 2) * kv_heads * kHeadDim);
    const ValueIndex out = stage.value(group * kv_heads * kHeadDim);
    const Work work = stage.add_attention(qkv, out, group, queries, context);
    stage.compile(queries, context);
    int64_t cache = 0;
    return time_batches([&] { stage.run(*stream_, pages * (cache++ % caches)); }, work, seconds);
  }

  ProbeTiming elementwise(int64_t tokens, double seconds) {
    Synthetic stage = synthetic();
    const Work work = stage.add_elementwise(tokens);
    return time_stage(stage, tokens, tokens, work, seconds);
  }

  ProbeTiming empty_ops(int64_t ops, double seconds) {
    Synthetic stage = synthetic();
    stage.add_empty_ops(ops);
    return time_stage(stage, 1, 1, {}, seconds);
  }

  ProbeTiming empty_step(bool crossings, double seconds) {
    Synthetic stage = synthetic();
    stage.add_empty_ops(0);
    stage.compile(1, 1);
    const std::unique_ptr<Event> done = device_->create_event();
    constexpr int64_t kBytes = kHidden * int64_t{sizeof(float)};
    const auto step = [&] {
      if (crossings) stream_->upload(memory_.address(), pinned_.data(), kBytes);
      stage.run(*stream_);
      if (crossings) stream_->download(pinned_.data(), memory_.address(), kBytes);
      stream_->record(*done);
      done->synchronize();
    };
    return time_batches(step, {}, seconds);
  }

  ProbeTiming copy(bool to_device, bool page_locked, double seconds) {
    std::byte* host = page_locked ? pinned_.data() : pageable_.data();
    const auto copy = [&] {
      if (to_device) {
        stream_->upload(memory_.address(), host, kCopyBytes);
      } else {
        stream_->download(host, memory_.address(), kCopyBytes);
      }
    };
    return time_batches(copy, {0, static_cast<double>(kCopyBytes)}, seconds);
  }

  ProbeTiming queued_copies(int64_t copies, double seconds) {
    const auto copy = [&] {
      for (int64_t i = 0; i < copies; ++i) {
        const int64_t at = i * kSmallCopyBytes % kCopyBytes;
        stream_->upload(memory_.address() + at, pinned_.data() + at, kSmallCopyBytes);
      }
    };
    return time_batches(copy, {0, static_cast<double>(copies * kSmallCopyBytes)}, seconds);
  }

 private:
  Synthetic synthetic() {
    slices_.start();
    return {account_, slices_, fill_};
  }

  ProbeTiming narrow_products(const Format& format, int64_t tokens, double seconds) {
    Synthetic stage = synthetic();
    const ValueIndex in = stage.value(kNarrow.cols);
    const ValueIndex out = stage.value(kNarrow.rows);
    Work work;
    do {
      add(work, stage.add_product(in, out, kNarrow, format, tokens));
    } while (!slices_.enough() && work.flops < kNarrowFlops);
    return time_stage(stage, tokens, tokens, work, seconds);
  }

  ProbeTiming time_stage(Synthetic& stage, int64_t tokens, int64_t context, const Work& work,
                         double seconds) {
    stage.compile(tokens, context);
    return time_batches([&] { stage.run(*stream_); }, work, seconds);
  }

  // Batches of runs long enough to be timed, after a run that touches everything.
  template <typename Run>
  ProbeTiming time_batches(const Run& run, const Work& work, double seconds) {
    run();
    stream_->synchronize();
    ProbeTiming timing{work.flops, work.bytes, {}, {}};
    int64_t runs = 1;
    const Clock::time_point start = Clock::now();
    while (timing.run_s.empty() || since(start) < seconds) {
      const Clock::time_point batch = Clock::now();
      for (int64_t i = 0; i < runs; ++i) run();
      stream_->synchronize();
      const double batch_s = since(batch);
      if (batch_s < kBatch_s && runs < kMostRuns) {
        runs *= 2;
      } else {
        timing.run_s.push_back(batch_s / static_cast<double>(runs));
      }
    }
    const double quickest = *std::min_element(timing.run_s.begin(), timing.run_s.end());
    std::copy_if(timing.run_s.begin(), timing.run_s.end(), std::back_inserter(timing.undisturbed_s),
                 [&](double s) { return s <= kNearQuickest * quickest; });
    return timing;
  }

  std::unique_ptr<Device> device_;
  Account account_;
  Account host_account_;  // of page-locked memory
  DeviceMemory memory_;
  Slices slices_;
  std::unique_ptr<Stream> stream_;
  StagingMemory pinned_;             // kCopyBytes of noise
  std::vector<std::byte> pageable_;  // likewise
  Fill fill_ = [this](DeviceAddress to, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kCopyBytes) {
      stream_->upload(to + at, pinned_.data(), std::min(kCopyBytes, bytes - at));
    }
    stream_->synchronize();
  };
  bool wide_ = false;
};

DeviceProbe::DeviceProbe(const std::string& specification, int64_t bytes,
                         const std::vector<std::string>& cublas_directories)
    : impl_(std::make_unique<Impl>(specification, std::max(bytes, kMinimumBytes),
                                   cublas_directories)) {}
DeviceProbe::~DeviceProbe() {
  if (!impl_->process.here()) static_cast<void>(impl_.release());  // as Engine's
}

DeviceProbe::Impl& DeviceProbe::used() const {
  impl_->process.check("[probe] this device was opened", "open it there");
  return *impl_;
}

ProbeTiming DeviceProbe::matmul(const Format& format, int64_t tokens, double seconds) {
  check(tokens >= 1 && tokens <= kMostTokens, "1 to 4096 tokens");
  return used().matmul(format, tokens, seconds);
}

ProbeTiming DeviceProbe::attention(DType dtype, int64_t group, int64_t queries, int64_t context,
                                   double seconds) {
  check(group >= 1 && group <= kMostGroup && queries >= 1 && context >= queries &&
            context <= kMostTokens,
        "1 to 64 query heads per KV head and 1 <= queries <= context <= 4096");
  return used().attention(dtype, group, queries, context, seconds);
}

ProbeTiming DeviceProbe::elementwise(int64_t tokens, double seconds) {
  check(tokens >= 1 && tokens <= kMostTokens, "1 to 4096 tokens");
  return used().elementwise(tokens, seconds);
}

ProbeTiming DeviceProbe::empty_ops(int64_t ops, double seconds) {
  check(ops >= 0 && ops <= kMostTokens, "0 to 4096 ops");
  return used().empty_ops(ops, seconds);
}

ProbeTiming DeviceProbe::empty_step(bool crossings, double seconds) {
  return used().empty_step(crossings, seconds);
}

ProbeTiming DeviceProbe::copy(bool to_device, bool page_locked, double seconds) {
  return used().copy(to_device, page_locked, seconds);
}

ProbeTiming DeviceProbe::queued_copies(int64_t copies, double seconds) {
  check(copies >= 1 && copies <= kMostTokens, "1 to 4096 copies");
  return used().queued_copies(copies, seconds);
}

}  // namespace helm
