#include "serve/predictor.h"

#include <algorithm>
#include <utility>

namespace helm {
namespace {

double slowdown(const Work& work) {
  return work.alone_s > 0 ? work.beside_s / work.alone_s : 1;
}

// By how much each of two works takes longer that begin together: both are disturbed until the
// first of them ends.
std::pair<double, double> slower_s(const Work& one, const Work& other) {
  const double both_s = std::min(one.beside_s, other.beside_s);
  const auto part = [&](const Work& work) { return both_s * (1 - 1 / slowdown(work)); };
  return {part(one), part(other)};
}

double together_s(const Work& one, const Work& other) {
  const auto [one_more_s, other_more_s] = slower_s(one, other);
  return std::max(one.alone_s + one_more_s, other.alone_s + other_more_s);
}

}  // namespace

Predictor::Predictor(PredictorTables tables, int64_t page_tokens) : tables_(std::move(tables)) {
  for (const AttentionTimes& layers : tables_.attention) {
    layers_ += static_cast<double>(layers.layers);
  }
  visit_position_s_ = tables_.block_to_accelerator_s / static_cast<double>(page_tokens);
  corrections_.fill(1);
}

StepLoad Predictor::load() const {
  StepLoad load;
  for (std::vector<double>* sums :
       {&load.near.positions, &load.far[0].positions, &load.far[1].positions, &load.prompt_s,
        &load.cpu_prompt_s, &load.prompt_beside_s}) {
    sums->assign(tables_.attention.size(), 0);
  }
  return load;
}

void Predictor::add(DecodeRows& reads, double length, double count) const {
  reads.rows += count;
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    const int64_t window = tables_.attention[c].window;
    const double seen = window > 0 ? std::min(length, static_cast<double>(window)) : length;
    reads.positions[c] += count * seen;
  }
}

void Predictor::add_prompt(StepLoad& load, double past, double tokens, bool far,
                           double count) const {
  load.prompt_rows += count * tokens;
  if (far) load.visit_s += count * past * visit_position_s_;
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    const AttentionTimes& layers = tables_.attention[c];
    const auto window = static_cast<double>(layers.window);
    // Pairs with keys up to a position, as causality and the window leave them.
    const auto pairs_to = [&](double end) {
      const double inside = layers.window > 0 ? std::min(end, window) : end;
      return inside * (inside + 1) / 2 + (end - inside) * window;
    };
    const double pairs = pairs_to(past + tokens) - pairs_to(past);
    const double all = past + tokens;
    const double seen = layers.window > 0 ? std::min(all, window + tokens - 1) : all;
    const double pairs_s = pairs * at(layers.pair_s, tokens);
    load.prompt_s[c] += count * std::max(pairs_s, seen * layers.near_s);
    load.prompt_beside_s[c] += count * std::max(pairs_s, seen * layers.near_beside_s);
    load.cpu_prompt_s[c] +=
        count * std::max(pairs * at(layers.cpu_pair_s, tokens), seen * layers.cpu_s);
  }
}

// In a line between the table's rows; beyond the last, of the last two.
double Predictor::at(const std::vector<double>& table, double rows) const {
  const std::vector<int64_t>& counts = tables_.rows;
  if (rows <= 0) return 0;
  if (rows <= static_cast<double>(counts[0])) return table[0];
  size_t i = 1;
  while (i + 1 < counts.size() && static_cast<double>(counts[i]) < rows) ++i;
  if (i == counts.size()) return table[0];
  const auto low = static_cast<double>(counts[i - 1]), high = static_cast<double>(counts[i]);
  const double share = (rows - low) / (high - low);
  return table[i - 1] + share * (table[i] - table[i - 1]);
}

double Predictor::with_cpu_s(const StepLoad& load) const {
  double seconds = tables_.step_s + at(tables_.head_s, load.outputs) + load.visit_s +
                   tables_.prompt_row_s * load.prompt_rows;
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    seconds += tables_.attention[c].cpu_s * load.near.positions[c] + load.cpu_prompt_s[c];
  }
  return seconds;
}

// Near attention in some layers.
Work Predictor::near(size_t c, const StepLoad& load) const {
  const AttentionTimes& layers = tables_.attention[c];
  const double positions = load.near.positions[c];
  return {layers.near_s * positions + load.prompt_s[c],
          layers.near_beside_s * positions + load.prompt_beside_s[c]};
}

// What the CPU takes for far rows in some layers, from when their values can be sent.
Work Predictor::far(size_t c, const DecodeRows& far) const {
  if (far.rows <= 0) return {};
  const AttentionTimes& layers = tables_.attention[c];
  const double each =
      tables_.ask_s + tables_.answer_s + (tables_.ask_row_s + tables_.answer_row_s) * far.rows;
  const double crossings_s = static_cast<double>(layers.layers) * each;
  return {crossings_s + layers.far_s * far.positions[c],
          crossings_s + layers.far_beside_s * far.positions[c]};
}

// All but attention in some of the accelerator's layers, of so many rows.
Work Predictor::products(size_t c, double rows) const {
  const auto layers = static_cast<double>(tables_.attention[c].layers);
  const double share = layers_ > 0 ? layers / layers_ : 0;
  return {at(tables_.accelerator_s, rows) * share, at(tables_.accelerator_beside_s, rows) * share};
}

double Predictor::seconds(StepMode mode, const StepLoad& load) const {
  const bool far = load.far[0].rows + load.far[1].rows > 0;
  if (mode == StepMode::kJoint && far) return joint_s(load);
  if (mode == StepMode::kSplit && far) return split_s(load);
  const double rows = load.near.rows + load.prompt_rows;
  double seconds = with_cpu_s(load) + at(tables_.cpu_s, rows) + at(tables_.accelerator_s, rows);
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    seconds += near(c, load).alone_s;
  }
  return seconds;
}

double Predictor::joint_s(const StepLoad& load) const {
  DecodeRows far = load.far[0];
  far.rows += load.far[1].rows;
  const double rows = load.near.rows + load.prompt_rows + far.rows;
  double seconds = with_cpu_s(load) + at(tables_.cpu_s, rows) + at(tables_.accelerator_s, rows) +
                   layers_ * tables_.parts_s;
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    const AttentionTimes& layers = tables_.attention[c];
    far.positions[c] += load.far[1].positions[c];
    const auto count = static_cast<double>(layers.layers);
    Work own = near(c, load);
    own.alone_s += count * tables_.near_part_s;
    own.beside_s += count * tables_.near_part_s;
    // Both attend once the CPU has been asked.
    const double asked_s = count * (tables_.ask_s + tables_.ask_row_s * far.rows);
    const double left_s = std::max(0.0, own.alone_s - asked_s);
    const Work left = {left_s, left_s * slowdown(own)};
    const Work attend = {layers.far_s * far.positions[c], layers.far_beside_s * far.positions[c]};
    const auto [own_more_s, far_more_s] = slower_s(left, attend);
    seconds += layers.cpu_s * far.positions[c] +
               std::max(own.alone_s + own_more_s, this->far(c, far).alone_s + far_more_s);
  }
  return seconds;
}

// The first sub-batch has the near rows and the prompts.
double Predictor::split_s(const StepLoad& load) const {
  const auto& [first, second] = load.far;
  const double rows = load.near.rows + load.prompt_rows + first.rows;
  double seconds = with_cpu_s(load) + at(tables_.cpu_s, rows) + at(tables_.cpu_s, second.rows) +
                   2 * layers_ * tables_.parts_s;
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    const AttentionTimes& layers = tables_.attention[c];
    const Work own = near(c, load), products = this->products(c, second.rows);
    const Work other = {products.alone_s + own.alone_s, products.beside_s + own.beside_s};
    seconds += layers.cpu_s * (first.positions[c] + second.positions[c]) +
               together_s(this->products(c, rows), far(c, second)) +
               together_s(other, far(c, first));
  }
  return seconds;
}

std::array<double, 2> Predictor::hidden_s(const StepLoad& load) const {
  const auto& [first, second] = load.far;
  const double rows = load.near.rows + load.prompt_rows + first.rows;
  std::array<double, 2> hidden = {at(tables_.accelerator_s, second.rows),
                                  at(tables_.accelerator_s, rows)};
  for (size_t c = 0; c < tables_.attention.size(); ++c) {
    hidden[0] += near(c, load).alone_s - far(c, first).alone_s;
    hidden[1] -= far(c, second).alone_s;
  }
  return hidden;
}

// Of a step with so many rows of prompts.
double Predictor::steady_s(StepMode mode, double near, double far, double chunk,
                           const RequestShape& shape) const {
  const double length = shape.prompt + shape.output / 2;
  StepLoad load = this->load();
  add(load.near, length, near);
  add(load.far[mode == StepMode::kSplit], length, far);
  load.outputs = near + far + chunk / shape.prompt;
  if (chunk > 0) {
    const double tokens = std::min(chunk, shape.prompt);
    add_prompt(load, (shape.prompt - tokens) / 2, tokens, false, chunk / tokens);
  }
  return corrected_s(mode, seconds(mode, load));
}

double Predictor::steady_rate(StepMode mode, double near, double far,
                              const RequestShape& shape) const {
  if (mode == StepMode::kNear) far = 0;
  const double per_token = shape.prompt / shape.output;  // rows of prompts
  const double chunk = std::max(shape.chunk, (near + far) * per_token);
  const double with_s = steady_s(mode, near, far, chunk, shape);
  double best = 0;
  for (const double others : {far, 0.0}) {  // far rows of steps without prompts
    if (near + others <= 0) continue;
    // Tokens of a step, of which a share has the chunk: as many rows as those tokens ask for.
    const double tokens = (near + others) / (1 - per_token / chunk * (far - others));
    const double share = tokens * per_token / chunk;
    if (others < far && share * (kMostSkips + 1) < 1) continue;  // they would wait for too long
    const StepMode without = others > 0 ? mode : StepMode::kNear;
    const double without_s = steady_s(without, near, others, 0, shape);
    best = std::max(best, tokens / (share * with_s + (1 - share) * without_s));
  }
  return best;
}

void Predictor::note(StepMode mode, double table_s, double measured_s) {
  if (!(table_s > 0) || !(measured_s > 0)) return;
  const auto noted = static_cast<size_t>(mode);
  double& correction = corrections_[noted];
  correction += kLatest * (measured_s / table_s - correction);
  correction = std::clamp(correction, kLeast, kMost);
  ran_.set(noted);
  for (size_t other = 0; other < corrections_.size(); ++other) {
    if (!ran_.test(other)) corrections_[other] = correction;
  }
}

}  // namespace helm
