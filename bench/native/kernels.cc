// helm-bench-kernels: kernel rates as shares of the ceilings of the same machine in the same
// rounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "cases.h"
#include "cpu/integer_isa.h"
#include "cpu/isa.h"
#include "probe/ceiling.h"

namespace helm::bench {
namespace {

struct Options {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  int rounds = 5;
  int layers = 20;
  bool all_tiers = false;  // products alone, as a table
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

constexpr int64_t kProductTokens[] = {1, 2, 4, 8, 16, 64, 512};

constexpr const char* kPackedFormats[] = {"c4.km32", "c4.s32", "c8.s32", "c6.k16", "c5.km32"};
constexpr int64_t kIntegerTokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 64, 512};

constexpr DecodeShape kDecodeShapes[] = {
    // Qwen3-0.6B and 1.7B
    {16, 8, 128, 160, 1},
    {16, 8, 128, 160, 4},
    {16, 8, 128, 160, 8},
    {16, 8, 128, 1024, 1},
    {16, 8, 128, 1024, 8},
    {16, 8, 128, 4096, 1},
    {16, 8, 128, 8192, 1},
    {16, 8, 128, 8192, 4},
    {16, 8, 128, 32768, 1},
    // Llama-3-8B
    {32, 8, 128, 1024, 1},
    {32, 8, 128, 8192, 1},
    {32, 8, 128, 8192, 4},
    {32, 8, 128, 32768, 1},
};

// Verifies cases and keeps those that the options ask for.
class Rows {
 public:
  explicit Rows(const Options& options) : options_(options) {}

  void add(const cpu::KernelTable& table, DType dtype) {
    if (!wanted(options_.tier, table.name) || !wanted(options_.dtype, dtype_name(dtype))) return;
    const Machine machine{options_.threads, options_.layers};
    const bool of_weights = static_cast<int>(dtype) < kDTypes;
    if (of_weights && matches("matmul")) {
      if (!weights_ || weights_dtype_ != dtype) {
        weights_ = make_weights(dtype, machine, probe::Pages::kHuge);
      }
      weights_dtype_ = dtype;
      for (int64_t tokens : kProductTokens) {
        keep(table, matmul_case(table, dtype, tokens, weights_, machine));
        if (dtype == DType::kBF16) {
          if (!compressed_) compressed_ = make_compressed_weights(machine);
          keep(table, matmul_case(table, dtype, tokens, compressed_, machine));
        }
        if (tokens == 1 && &table == &best_table() && !options_.all_tiers &&
            matches("matmul tokens 1 small pages")) {
          const auto small = make_weights(dtype, machine, probe::Pages::kSmall);
          keep(table, matmul_case(table, dtype, tokens, small, machine));
        }
      }
    }
    if (of_weights && matches("prefill attention")) {
      keep(table, prefill_attention_case(table, dtype, 512, machine));
    }
    if (!matches("decode attention") || &table != &best_table()) return;
    if (!pages_) pages_ = make_pages();
    for (const DecodeShape& shape : kDecodeShapes) {
      keep(table, decode_attention_case(table, dtype, shape, pages_, machine));
    }
  }
  // Their ceilings are those of the best tier of floats.
  void add(const cpu::IntegerTable& table, const std::string& name) {
    if (!wanted(options_.tier, table.name) || !wanted(options_.dtype, name)) return;
    if (!matches("integer")) return;
    const Machine machine{options_.threads, options_.layers};
    const Format format = format_from_name(name);
    if (packed_format_ != name) packed_ = make_packed_weights(format, machine);
    packed_format_ = name;
    for (const int64_t tokens : kIntegerTokens) {
      keep(cpu::select_kernels(), integer_case(table, format, tokens, packed_, machine));
    }
  }
  std::vector<Row> take() { return std::move(rows_); }

 private:
  // One of the strings is the beginning of the other.
  bool matches(const std::string& kind) const {
    const size_t common = std::min(kind.size(), options_.match.size());
    return kind.compare(0, common, options_.match, 0, common) == 0;
  }
  // The tier that was asked for, or else the best: a pass of the slow ones takes long.
  const cpu::KernelTable& best_table() const {
    for (const cpu::IsaStatus& isa : cpu::isa_report()) {
      if (isa.available && options_.tier == cpu::isa_name(isa.isa))
        return *cpu::kernels_of(isa.isa);
    }
    return cpu::select_kernels();
  }
  void keep(const cpu::KernelTable& table, std::unique_ptr<Case> c) {
    if (c->name.compare(0, options_.match.size(), options_.match) != 0) return;
    c->verify();
    rows_.push_back({std::move(c), &table, {}, {}});
  }

  const Options& options_;
  std::shared_ptr<Weights> weights_, compressed_;
  DType weights_dtype_ = DType::kF32;
  std::shared_ptr<PackedWeights> packed_;
  std::string packed_format_;
  std::shared_ptr<const probe::Buffer> pages_;
  std::vector<Row> rows_;
};

std::vector<Row> make_rows(const Options& o) {
  Rows rows(o);
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kI8}) {
    for (const cpu::IsaStatus& isa : cpu::isa_report()) {
      if (isa.available) rows.add(*cpu::kernels_of(isa.isa), dtype);
    }
  }
  for (const char* format : kPackedFormats) {
    for (const cpu::IntegerStatus& isa : cpu::integer_report()) {
      if (isa.available) rows.add(*cpu::integer_kernels_of(isa.isa), format);
    }
  }
  return rows.take();
}

double median(std::vector<double> v) {
  return stats_of(std::move(v)).median;
}

// In every round a case takes turns with its ceiling, so that a share compares neighbours in time
// on a machine that drifts; both sides are medians.
void measure(const Options& o, std::vector<Row>* rows, std::vector<double>* reads,
             std::map<std::string, std::vector<double>>* peaks) {
  constexpr int kTurns = 4;
  constexpr double kTurn_s = 0.05;
  const probe::Buffer buffer(int64_t{1} << 30);
  for (int round = 0; round < o.rounds; ++round) {
    for (Row& row : *rows) {
      std::vector<double> ceilings, passes;
      row.timed->pass_s();  // warm up
      for (int turn = 0; turn < kTurns; ++turn) {
        ceilings.push_back(
            row.timed->unit == Unit::kBytes
                ? probe::stream_read_bytes_per_s(o.threads, buffer, kTurn_s, row.table)
                : probe::fma_flops(o.threads, kTurn_s, row.table));
        for (double spent = 0; spent < kTurn_s; spent += passes.back()) {
          passes.push_back(row.timed->pass_s());
        }
      }
      const double ceiling = median(ceilings);
      (row.timed->unit == Unit::kBytes ? *reads : (*peaks)[row.timed->tier]).push_back(ceiling);
      row.rates.push_back(row.timed->work / median(passes));
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
  std::printf("%-11s %-5s %-46s %10s %21s %18s\n", "tier", "dtype", "case", "median", "[min-max]",
              "share [min-max]");
  for (const Row& row : rows) {
    const Stats r = stats_of(row.rates), share = stats_of(row.shares);
    std::printf("%-11s %-5s %-46s %10.1f [%8.1f-%8.1f] %7s %4.0f%% [%3.0f-%3.0f]\n",
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

// A line per tier and dtype, a column per number of tokens, and what the machine lacks.
void print_tiers(const std::vector<Row>& rows) {
  std::printf(
      "\nproducts by tokens: GB/s of weights and share of the read ceiling up to 8, then "
      "GFLOP/s and share of the tier's f32 FMA peak\n%-17s",
      "");
  for (int64_t tokens : kProductTokens) std::printf("%15lld", static_cast<long long>(tokens));
  std::string line;
  for (const Row& row : rows) {
    const std::string next = row.timed->tier + " " + row.timed->dtype;
    if (next != line) std::printf("\n%-17s", next.c_str());
    line = next;
    std::printf("%9.1f %4.0f%%", stats_of(row.rates).median / 1e9,
                stats_of(row.shares).median * 100);
  }
  std::printf("\n");
  for (const cpu::IsaStatus& isa : cpu::isa_report()) {
    if (isa.available) continue;
    std::printf("%-17s not measured: %s\n", cpu::isa_name(isa.isa), isa.reason.c_str());
  }
}

int usage() {
  std::fprintf(stderr,
               "helm-bench-kernels [--threads N] [--rounds N] [--layers N] [--tier T] [--dtype D]\n"
               "                   [--match START] [--json FILE] [--all-tiers]\n");
  return 2;
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--all-tiers") {
      o.all_tiers = true;
      o.match = "matmul";
      --i;  // takes no value
      continue;
    }
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
  if (o.all_tiers) print_tiers(rows);
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
