// A plan's tables of seconds, of which modes of steps are chosen.
#include <algorithm>

#include "plan/reader.h"

namespace helm {
namespace {

constexpr size_t kMostRows = 64, kMostWindows = 16;

double seconds(const JsonReader& node) {
  const double found = node.number();
  if (found < 0) node.reject("expected seconds from 0, found ", found);
  return found;
}

std::vector<double> table(const JsonReader& node, size_t size) {
  if (node.size() != size) {
    node.reject("expected ", size, " entries, as rows has, found ", node.size());
  }
  std::vector<double> found;
  for (size_t i = 0; i < size; ++i) found.push_back(seconds(node[i]));
  return found;
}

std::vector<int64_t> row_counts(const JsonReader& node) {
  if (node.size() == 0 || node.size() > kMostRows) {
    node.reject("expected 1 to ", kMostRows, " counts of rows, found ", node.size());
  }
  std::vector<int64_t> found;
  for (size_t i = 0; i < node.size(); ++i) {
    found.push_back(node[i].integer(1, kMaxCount));
    const bool rises = i == 0 ? found[0] == 1 : found[i] > found[i - 1];
    if (!rises) node[i].reject("expected counts that rise from 1, found ", found[i]);
  }
  return found;
}

void check_beside(const JsonReader& node, double beside_s, double alone_s, const char* alone) {
  if (beside_s < alone_s) node.reject("expected no less than ", alone, ", found ", beside_s);
}

AttentionTimes attention(const JsonReader& node, size_t rows) {
  node.only({"window", "layers", "cpu_s", "near_s", "far_s", "near_beside_s", "far_beside_s",
             "cpu_pair_s", "pair_s"});
  AttentionTimes times;
  times.window = node["window"].integer(0, kMaxExtent);
  times.layers = node["layers"].integer(0, kMaxCount);
  times.cpu_s = seconds(node["cpu_s"]);
  times.near_s = seconds(node["near_s"]);
  times.far_s = seconds(node["far_s"]);
  times.near_beside_s = seconds(node["near_beside_s"]);
  times.far_beside_s = seconds(node["far_beside_s"]);
  check_beside(node["near_beside_s"], times.near_beside_s, times.near_s, "near_s");
  check_beside(node["far_beside_s"], times.far_beside_s, times.far_s, "far_s");
  times.cpu_pair_s = table(node["cpu_pair_s"], rows);
  times.pair_s = table(node["pair_s"], rows);
  return times;
}

}  // namespace

void PlanReader::read_predictor(const JsonReader& node) {
  if (node.is_null()) return;
  node.only({"rows", "cpu_s", "accelerator_s", "accelerator_beside_s", "head_s", "attention",
             "step_s", "prompt_row_s", "parts_s", "near_part_s", "ask_s", "ask_row_s", "answer_s",
             "answer_row_s", "block_to_host_s", "block_to_accelerator_s"});
  if (std::ranges::all_of(plan_.units, [](const UnitSpec& u) { return u.device == kCpu; })) {
    node.reject("expected null, as all units lie on the CPU");
  }
  PredictorTables& tables = plan_.predictor.emplace();
  tables.rows = row_counts(node["rows"]);
  const size_t rows = tables.rows.size();
  tables.cpu_s = table(node["cpu_s"], rows);
  tables.accelerator_s = table(node["accelerator_s"], rows);
  tables.accelerator_beside_s = table(node["accelerator_beside_s"], rows);
  for (size_t i = 0; i < rows; ++i) {
    check_beside(node["accelerator_beside_s"][i], tables.accelerator_beside_s[i],
                 tables.accelerator_s[i], "accelerator_s");
  }
  tables.head_s = table(node["head_s"], rows);
  const JsonReader list = node["attention"];
  if (list.size() == 0 || list.size() > kMostWindows) {
    list.reject("expected 1 to ", kMostWindows, " kinds of layers, found ", list.size());
  }
  for (size_t i = 0; i < list.size(); ++i) {
    tables.attention.push_back(attention(list[i], rows));
    for (size_t j = 0; j < i; ++j) {
      if (tables.attention[j].window != tables.attention[i].window) continue;
      list[i]["window"].reject("is listed twice");
    }
  }
  for (const auto& [name, field] : {std::pair{"step_s", &tables.step_s},
                                    {"prompt_row_s", &tables.prompt_row_s},
                                    {"parts_s", &tables.parts_s},
                                    {"near_part_s", &tables.near_part_s},
                                    {"ask_s", &tables.ask_s},
                                    {"ask_row_s", &tables.ask_row_s},
                                    {"answer_s", &tables.answer_s},
                                    {"answer_row_s", &tables.answer_row_s},
                                    {"block_to_host_s", &tables.block_to_host_s},
                                    {"block_to_accelerator_s", &tables.block_to_accelerator_s}}) {
    *field = seconds(node[name]);
  }
}

}  // namespace helm
