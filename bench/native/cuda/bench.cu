// helm-bench-cuda: rates of the decode kernels as shares of the streaming reads of the same device
// in the same rounds; of prompt attention, as multiples of its kernel in f32.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "cases.h"

namespace helm::bench {
namespace {

struct Options {
  int rounds = 7;
  int64_t bytes = int64_t{1} << 30;  // that one reading of the ceiling takes, twice those of a case
  std::vector<std::string> matches;  // parts of the names of cases; none: all
  std::string json;
};

struct Stats {
  double median, min, max;
};
Stats stats_of(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return {v[v.size() / 2], v.front(), v.back()};
}

class Timer {
 public:
  Timer() {
    check(cudaStreamCreate(&stream_), "stream");
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  cudaStream_t stream() const { return stream_; }

  template <class F>
  double seconds(const F& enqueue) {
    check(cudaEventRecord(begin_, stream_), "record");
    enqueue();
    check(cudaEventRecord(end_, stream_), "record");
    check(cudaStreamSynchronize(stream_), "kernels");
    check(cudaGetLastError(), "launch");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "time");
    return ms * 1e-3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

// As many launches as take about `total_s` as one graph: a decode step pays no launch overhead
// either. Every launch has run once when the constructor returns.
class Repeated {
 public:
  template <class F>
  Repeated(Timer& timer, double total_s, const F& enqueue) : timer_(timer) {
    enqueue(timer.stream());  // whose code may have to be loaded first
    const double once = timer.seconds([&] { enqueue(timer.stream()); });
    launches_ = static_cast<int>(std::clamp(total_s / once, 1.0, 400.0));
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(timer.stream(), cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < launches_; ++i) enqueue(timer.stream());
    check(cudaStreamEndCapture(timer.stream(), &graph), "capture");
    check(cudaGraphInstantiate(&exec_, graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
    launch_s();
  }
  ~Repeated() { cudaGraphExecDestroy(exec_); }
  Repeated(const Repeated&) = delete;
  Repeated& operator=(const Repeated&) = delete;

  // Seconds of one launch.
  double launch_s() {
    return timer_.seconds([&] { check(cudaGraphLaunch(exec_, timer_.stream()), "launch"); }) /
           launches_;
  }

 private:
  Timer& timer_;
  int launches_ = 0;
  cudaGraphExec_t exec_ = nullptr;
};

constexpr double kCeiling_s = 0.005, kCase_s = 0.02;

// The rate at which the device reads memory of `bytes` once.
class Ceiling {
 public:
  Ceiling(Timer& timer, int64_t bytes) : buffer_(bytes) {
    check(cudaMemset(buffer_.as(), 0, static_cast<size_t>(bytes)), "clearing");
    reads_.emplace(timer, kCeiling_s, [&](cudaStream_t stream) {
      stream_read(buffer_.as(), read_bytes(),
                  reinterpret_cast<float*>(buffer_.as<char>() + read_bytes()), stream);
    });
  }
  double bytes_per_s() { return static_cast<double>(read_bytes()) / reads_->launch_s(); }

 private:
  int64_t read_bytes() const { return buffer_.bytes() - 16; }
  DeviceBuffer buffer_;
  std::optional<Repeated> reads_;
};

struct Row {
  std::string name;
  Stats rate, share;
  bool computes;  // FLOP/s over those in f32; else bytes/s over the ceiling
};

// Every round reads the ceiling again right before the case.
Row measure(Case& timed, int rounds, Ceiling& ceiling, Timer& timer) {
  std::vector<double> rates, shares;
  Repeated launches(timer, kCase_s, [&](cudaStream_t stream) { timed.enqueue(stream); });
  for (int round = 0; round < rounds; ++round) {
    const double most = ceiling.bytes_per_s();
    rates.push_back(static_cast<double>(timed.bytes) / launches.launch_s());
    shares.push_back(rates.back() / most);
  }
  return {timed.name, stats_of(rates), stats_of(shares), false};
}

// Every round runs the kernel in f32 right before the case.
Row compare(Case& timed, int rounds, Timer& timer) {
  std::vector<double> rates, times;
  Repeated f32(timer, kCase_s, [&](cudaStream_t stream) { timed.enqueue_f32(stream); });
  Repeated launches(timer, kCase_s, [&](cudaStream_t stream) { timed.enqueue(stream); });
  for (int round = 0; round < rounds; ++round) {
    const double slow_s = f32.launch_s(), fast_s = launches.launch_s();
    rates.push_back(timed.flops() / fast_s);
    times.push_back(slow_s / fast_s);
  }
  return {timed.name, stats_of(rates), stats_of(times), true};
}

void print(const Row& r) {
  if (r.computes) {
    std::printf("%-60s %8.2f [%8.2f-%8.2f] TFLOP/s, %.1f [%.1f-%.1f] times those in f32\n",
                r.name.c_str(), r.rate.median / 1e12, r.rate.min / 1e12, r.rate.max / 1e12,
                r.share.median, r.share.min, r.share.max);
  } else {
    std::printf("%-60s %8.1f [%8.1f-%8.1f] GB/s %4.0f%% [%3.0f-%3.0f]\n", r.name.c_str(),
                r.rate.median / 1e9, r.rate.min / 1e9, r.rate.max / 1e9, r.share.median * 100,
                r.share.min * 100, r.share.max * 100);
  }
}

// Whole at any time, for whoever ends the run early.
void write_json(const Options& o, const cudaDeviceProp& device, const std::vector<Row>& rows) {
  const std::string part = o.json + ".part";
  std::FILE* f = std::fopen(part.c_str(), "w");
  if (!f) throw Error(ErrorKind::kIo, "[bench] cannot write " + part);
  std::fprintf(f, "{\"device\": \"%s\", \"compute_capability\": \"%d.%d\", \"rounds\": %d,\n",
               device.name, device.major, device.minor, o.rounds);
  std::fprintf(f, " \"results\": [\n");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    std::fprintf(f,
                 "  {\"case\": \"%s\", \"unit\": \"%s\", \"median\": %.6g, \"min\": %.6g, "
                 "\"max\": %.6g, \"%s\": %.4f}%s\n",
                 r.name.c_str(), r.computes ? "FLOP/s" : "bytes/s", r.rate.median, r.rate.min,
                 r.rate.max, r.computes ? "times_f32" : "share", r.share.median,
                 i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(f, "]}\n");
  if (std::fclose(f) != 0 || std::rename(part.c_str(), o.json.c_str()) != 0) {
    throw Error(ErrorKind::kIo, "[bench] cannot write " + o.json);
  }
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    if (i + 1 < argc && key == "--rounds") {
      o.rounds = std::max(1, std::atoi(argv[i + 1]));
    } else if (i + 1 < argc && key == "--bytes") {
      o.bytes = std::max<int64_t>(1 << 16, std::atoll(argv[i + 1]) / 16 * 16);
    } else if (i + 1 < argc && key == "--match") {
      o.matches.emplace_back(argv[i + 1]);
    } else if (i + 1 < argc && key == "--json") {
      o.json = argv[i + 1];
    } else {
      std::fprintf(stderr,
                   "helm-bench-cuda [--rounds N] [--bytes N] [--match TEXT]... [--json FILE]\n");
      return 2;
    }
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a log shows how far the run came
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device properties");
  std::printf("%s, compute capability %d.%d, rounds %d\n", device.name, device.major, device.minor,
              o.rounds);
  Timer timer;
  Ceiling ceiling(timer, o.bytes);
  std::vector<Row> rows;
  for_each_case(o.matches, o.bytes / 2, [&](Case& timed) {
    rows.push_back(timed.flops() > 0 ? compare(timed, o.rounds, timer)
                                     : measure(timed, o.rounds, ceiling, timer));
    print(rows.back());
    if (!o.json.empty()) write_json(o, device, rows);
  });
  if (rows.empty()) {
    std::fprintf(stderr, "[bench] no case has such a name\n");
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace helm::bench

int main(int argc, char** argv) {
  try {
    return helm::bench::run(argc, argv);
  } catch (const helm::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
