// helm-bench-kernels: kernel rates as shares of the ceilings of the same machine in the same
// rounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "cases.h"
#include "cpu/isa.h"
#include "probe/ceiling.h"

namespace helm::bench {
namespace {

struct Options {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  int rounds = 5;
  int layers = 20;
  std::string tier, dtype, match, json;
};

struct Stats {
  double median, min, max;
};

Stats stats_of(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return {v[v.size() / 2], v.front(), v.back()};
}

struct Row {
  std::unique_ptr<Case> timed;
  const cpu::KernelTable* table;
  std::vector<double> rates, shares;
};

bool wanted(const std::string& filter, const std::string& name) {
  return filter.empty() || filter == name;
}

std::vector<Row> make_rows(const Options& o) {
  const Machine machine{o.threads, o.layers};
  std::vector<Row> rows;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    constexpr const char* kNames[kDTypes] = {"f32", "f16", "bf16"};
    if (!wanted(o.dtype, kNames[static_cast<int>(dtype)])) continue;
    std::shared_ptr<Weights> weights;
    for (const cpu::IsaStatus& isa : cpu::isa_report()) {
      if (!isa.available || !wanted(o.tier, cpu::isa_name(isa.isa))) continue;
      const cpu::KernelTable* table = cpu::kernels_of(isa.isa);
      const auto keep = [&](std::unique_ptr<Case> c) {
        if (c->name.find(o.match) == std::string::npos) return;
        c->verify();
        rows.push_back({std::move(c), table, {}, {}});
      };
      if (!weights) weights = make_weights(dtype, machine);
      for (int64_t tokens : {1, 2, 4, 8, 16, 64, 512}) {
        keep(matmul_case(*table, dtype, tokens, weights, machine));
      }
      keep(attention_case(*table, dtype, 1, 8192, machine));
      keep(attention_case(*table, dtype, 512, 512, machine));
    }
  }
  return rows;
}

// Every round measures both ceilings again right before each case, so that a share compares
// neighbours in time on a machine that drifts.
void measure(const Options& o, std::vector<Row>* rows, std::vector<double>* reads,
             std::map<std::string, std::vector<double>>* peaks) {
  const probe::Buffer buffer(int64_t{1} << 30);
  for (int round = 0; round < o.rounds; ++round) {
    for (Row& row : *rows) {
      double ceiling;
      if (row.timed->unit == Unit::kBytes) {
        ceiling = probe::stream_read_bytes_per_s(o.threads, buffer, 0.1, row.table);
        reads->push_back(ceiling);
      } else {
        ceiling = probe::fma_flops(o.threads, 0.05, row.table);
        (*peaks)[row.timed->tier].push_back(ceiling);
      }
      row.timed->pass_s();  // warm up
      double best = 1e30, spent = 0;
      while (spent < 0.15) {
        const double s = row.timed->pass_s();
        best = std::min(best, s), spent += s;
      }
      row.rates.push_back(row.timed->work / best);
      row.shares.push_back(row.rates.back() / ceiling);
    }
  }
}

void print(const Options& o, const std::vector<Row>& rows, const std::vector<double>& reads,
           const std::map<std::string, std::vector<double>>& peaks) {
  std::printf("threads %d, rounds %d, best tier %s\n", o.threads, o.rounds,
              cpu::select_kernels().name);
  if (!reads.empty()) {
    const Stats s = stats_of(reads);
    std::printf("streaming read %.1f GB/s [%.1f-%.1f]\n", s.median / 1e9, s.min / 1e9, s.max / 1e9);
  }
  for (const auto& [tier, values] : peaks) {
    const Stats s = stats_of(values);
    std::printf("f32 FMA peak %s %.1f GFLOP/s [%.1f-%.1f]\n", tier.c_str(), s.median / 1e9,
                s.min / 1e9, s.max / 1e9);
  }
  std::printf("%-11s %-5s %-34s %10s %21s %18s\n", "tier", "dtype", "case", "median", "[min-max]",
              "share [min-max]");
  for (const Row& row : rows) {
    const Stats r = stats_of(row.rates), share = stats_of(row.shares);
    std::printf("%-11s %-5s %-34s %10.1f [%8.1f-%8.1f] %7s %4.0f%% [%3.0f-%3.0f]\n",
                row.timed->tier.c_str(), row.timed->dtype.c_str(), row.timed->name.c_str(),
                r.median / 1e9, r.min / 1e9, r.max / 1e9,
                row.timed->unit == Unit::kBytes ? "GB/s" : "GFLOP/s", share.median * 100,
                share.min * 100, share.max * 100);
  }
}

void write_json(const Options& o, const std::vector<Row>& rows) {
  std::FILE* f = std::fopen(o.json.c_str(), "w");
  if (!f) throw Error(ErrorKind::kIo, "[bench] cannot write " + o.json);
  std::fprintf(f, "{\"threads\": %d, \"rounds\": %d, \"results\": [\n", o.threads, o.rounds);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const Stats r = stats_of(row.rates), share = stats_of(row.shares);
    std::fprintf(f,
                 "  {\"tier\": \"%s\", \"dtype\": \"%s\", \"case\": \"%s\", \"unit\": \"%s\", "
                 "\"median\": %.6g, \"min\": %.6g, \"max\": %.6g, \"share\": %.4f}%s\n",
                 row.timed->tier.c_str(), row.timed->dtype.c_str(), row.timed->name.c_str(),
                 row.timed->unit == Unit::kBytes ? "bytes/s" : "flops", r.median, r.min, r.max,
                 share.median, i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(f, "]}\n");
  std::fclose(f);
}

int usage() {
  std::fprintf(stderr,
               "helm-bench-kernels [--threads N] [--rounds N] [--layers N] [--tier T] [--dtype D]\n"
               "                   [--match TEXT] [--json FILE]\n");
  return 2;
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    if (i + 1 >= argc) return usage();
    const char* value = argv[i + 1];
    if (key == "--threads") {
      o.threads = std::max(1, std::atoi(value));
    } else if (key == "--rounds") {
      o.rounds = std::max(1, std::atoi(value));
    } else if (key == "--layers") {
      o.layers = std::max(1, std::atoi(value));
    } else if (key == "--tier") {
      o.tier = value;
    } else if (key == "--dtype") {
      o.dtype = value;
    } else if (key == "--match") {
      o.match = value;
    } else if (key == "--json") {
      o.json = value;
    } else {
      return usage();
    }
  }
  std::vector<Row> rows = make_rows(o);
  std::vector<double> reads;
  std::map<std::string, std::vector<double>> peaks;
  measure(o, &rows, &reads, &peaks);
  print(o, rows, reads, peaks);
  if (!o.json.empty()) write_json(o, rows);
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
