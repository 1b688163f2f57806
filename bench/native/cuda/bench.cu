// helm-bench-cuda: rates of the decode kernels as shares of the streaming reads of the same device
// in the same rounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cases.h"

namespace helm::bench {
namespace {

struct Options {
  int rounds = 7;
  std::string match, json;
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

  // Seconds of one launch, out of as many as take 20 ms, replayed as a graph: a decode step pays no
  // launch overhead either.
  template <class F>
  double launch_s(const F& enqueue) {
    const double once = repeat_s(enqueue, 4) / 4;
    const int n = std::clamp(static_cast<int>(0.02 / once), 4, 400);
    return repeat_s(enqueue, n) / n;
  }

 private:
  template <class F>
  double repeat_s(const F& enqueue, int n) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < n; ++i) enqueue(stream_);
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "graph");
    check(cudaGraphLaunch(exec, stream_), "warm-up");
    check(cudaEventRecord(begin_, stream_), "record");
    check(cudaGraphLaunch(exec, stream_), "launch");
    check(cudaEventRecord(end_, stream_), "record");
    check(cudaStreamSynchronize(stream_), "kernels");
    check(cudaGetLastError(), "launch");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "time");
    check(cudaGraphExecDestroy(exec), "graph");
    check(cudaGraphDestroy(graph), "graph");
    return ms * 1e-3;
  }

  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

struct Row {
  std::string name;
  Stats rate, share;
};

// Every round reads the ceiling again right before the case.
Row measure(Case& timed, const Options& o, const DeviceBuffer& buffer, Timer& timer) {
  std::vector<double> rates, shares;
  for (int round = 0; round < o.rounds; ++round) {
    const double ceiling =
        static_cast<double>(buffer.bytes() - 16) / timer.launch_s([&](cudaStream_t stream) {
          stream_read(buffer.as(), buffer.bytes() - 16,
                      reinterpret_cast<float*>(buffer.as<char>() + buffer.bytes() - 16), stream);
        });
    const double s = timer.launch_s([&](cudaStream_t stream) { timed.enqueue(stream); });
    rates.push_back(static_cast<double>(timed.bytes) / s);
    shares.push_back(rates.back() / ceiling);
  }
  return {timed.name, stats_of(rates), stats_of(shares)};
}

void write_json(const Options& o, const cudaDeviceProp& device, const std::vector<Row>& rows) {
  std::FILE* f = std::fopen(o.json.c_str(), "w");
  if (!f) throw Error(ErrorKind::kIo, "[bench] cannot write " + o.json);
  std::fprintf(f, "{\"device\": \"%s\", \"compute_capability\": \"%d.%d\", \"rounds\": %d,\n",
               device.name, device.major, device.minor, o.rounds);
  std::fprintf(f, " \"results\": [\n");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    std::fprintf(f,
                 "  {\"case\": \"%s\", \"unit\": \"bytes/s\", \"median\": %.6g, \"min\": %.6g, "
                 "\"max\": %.6g, \"share\": %.4f}%s\n",
                 r.name.c_str(), r.rate.median, r.rate.min, r.rate.max, r.share.median,
                 i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(f, "]}\n");
  std::fclose(f);
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    if (i + 1 < argc && key == "--rounds") {
      o.rounds = std::max(1, std::atoi(argv[i + 1]));
    } else if (i + 1 < argc && key == "--match") {
      o.match = argv[i + 1];
    } else if (i + 1 < argc && key == "--json") {
      o.json = argv[i + 1];
    } else {
      std::fprintf(stderr, "helm-bench-cuda [--rounds N] [--match TEXT] [--json FILE]\n");
      return 2;
    }
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device properties");
  std::printf("%s, compute capability %d.%d, rounds %d\n", device.name, device.major, device.minor,
              o.rounds);
  const DeviceBuffer buffer(int64_t{1} << 30);
  check(cudaMemset(buffer.as(), 0, static_cast<size_t>(buffer.bytes())), "clearing");
  Timer timer;
  std::vector<Row> rows;
  for_each_case(o.match, [&](Case& timed) {
    rows.push_back(measure(timed, o, buffer, timer));
    const Row& r = rows.back();
    std::printf("%-60s %8.1f [%8.1f-%8.1f] GB/s %4.0f%% [%3.0f-%3.0f]\n", r.name.c_str(),
                r.rate.median / 1e9, r.rate.min / 1e9, r.rate.max / 1e9, r.share.median * 100,
                r.share.min * 100, r.share.max * 100);
  });
  if (!o.json.empty()) write_json(o, device, rows);
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
