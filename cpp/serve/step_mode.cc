#include "serve/step_mode.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace helm {

// Far rows in the order in which they join, at most as many as the step has room for.
struct ModeChooser::Ordered {
  std::vector<size_t> rows;
  size_t due = 0;  // of those, that take part whatever it costs: the first
};

ModeSet executed_modes() {
  ModeSet modes;
  for (const StepMode mode : kExecutedModes) modes.set(static_cast<size_t>(mode));
  return modes;
}

ModeChooser::ModeChooser(Predictor predictor, ModeSet allowed)
    : predictor_(std::move(predictor)), allowed_(allowed.set(0)) {}

double ModeChooser::per_second(const ModeChoice& choice) const {
  const double seconds = predictor_.corrected_s(choice.mode, choice.table_s);
  return seconds > 0 ? choice.progress / seconds : 0;
}

// Of the first so many rows, as many as make the most of a second.
ModeChoice ModeChooser::joint(const ModeSnapshot& snapshot, StepLoad load, double progress,
                              const Ordered& far) const {
  ModeChoice best;
  double most = -1;
  size_t kept = 0, taken = 0;
  for (const size_t row : far.rows) {
    predictor_.add(load.far[0], static_cast<double>(snapshot.rows[row].length));
    ++load.outputs;
    ++taken;
    if (taken < far.due) continue;
    const ModeChoice choice{StepMode::kJoint,
                            {},
                            {},
                            predictor_.seconds(StepMode::kJoint, load),
                            progress + static_cast<double>(taken)};
    if (per_second(choice) <= most) continue;
    most = per_second(choice), best = choice, kept = taken;
  }
  best.far.assign(far.rows.begin(), far.rows.begin() + static_cast<std::ptrdiff_t>(kept));
  return best;
}

// Each row goes to the sub-batch under which the CPU is hidden by more, if it stays hidden there. A
// row is passed over that is no shorter than one that found no place. With nothing near there is
// nothing to hide under, and sub-batches take turns.
ModeChoice ModeChooser::split(const ModeSnapshot& snapshot, StepLoad load, double progress,
                              const Ordered& far) const {
  const bool alone = load.near.rows + load.prompt_rows == 0;
  std::vector<std::pair<size_t, size_t>> taken;  // row, sub-batch
  ModeChoice best;
  double most = -1;
  size_t kept = 0;
  int64_t refused = std::numeric_limits<int64_t>::max();  // positions
  for (size_t i = 0; i < far.rows.size(); ++i) {
    const int64_t length = snapshot.rows[far.rows[i]].length;
    const bool due = i < far.due;
    if (!due && !alone && length >= refused) continue;
    const auto hidden = predictor_.hidden_s(load);
    const size_t batch = load.far[1].rows == 0 || hidden[1] > hidden[0] ? 1 : 0;
    predictor_.add(load.far[batch], static_cast<double>(length));
    const auto now = predictor_.hidden_s(load);
    if (!due && !alone && std::min(now[0], now[1]) < 0) {
      predictor_.add(load.far[batch], static_cast<double>(length), -1);
      refused = length;
      continue;
    }
    ++load.outputs;
    taken.emplace_back(far.rows[i], batch);
    if (i + 1 < far.due) continue;
    const ModeChoice choice{StepMode::kSplit,
                            {},
                            {},
                            predictor_.seconds(StepMode::kSplit, load),
                            progress + static_cast<double>(taken.size())};
    if (per_second(choice) <= most) continue;
    most = per_second(choice), best = choice, kept = taken.size();
  }
  for (size_t i = 0; i < kept; ++i) {
    (taken[i].second == 1 ? best.second : best.far).push_back(taken[i].first);
  }
  return best;
}

ModeChoice ModeChooser::choose(const ModeSnapshot& snapshot) {
  StepLoad load = predictor_.load();
  double progress = 0;
  Ordered far;
  for (size_t i = 0; i < snapshot.rows.size(); ++i) {
    const ModeRow& row = snapshot.rows[i];
    if (row.far) {
      far.rows.push_back(i);
      continue;
    }
    predictor_.add(load.near, static_cast<double>(row.length));
    ++load.outputs;
    ++progress;
  }
  for (const ModePrompt& prompt : snapshot.prompts) {
    predictor_.add_prompt(load, static_cast<double>(prompt.past),
                          static_cast<double>(prompt.tokens), prompt.far);
    load.outputs += prompt.output ? 1 : 0;
    progress += static_cast<double>(prompt.tokens) / static_cast<double>(prompt.whole);
  }
  const auto due = [&](size_t i) {
    const ModeRow& row = snapshot.rows[i];
    return row.skips >= kMostSkips ||
           (snapshot.usual_s > 0 && row.waited_s > kMostWait * snapshot.usual_s);
  };
  std::stable_sort(far.rows.begin(), far.rows.end(), [&](size_t a, size_t b) {
    return std::pair(due(a), snapshot.rows[a].skips) > std::pair(due(b), snapshot.rows[b].skips);
  });
  const int64_t rows = snapshot.most_rows - static_cast<int64_t>(load.near.rows + load.prompt_rows);
  const int64_t outputs = snapshot.most_outputs - static_cast<int64_t>(load.outputs);
  const auto room = static_cast<size_t>(std::max<int64_t>(0, std::min(rows, outputs)));
  if (far.rows.size() > room) far.rows.resize(room);
  far.due = !far.rows.empty() && due(far.rows.front()) ? 1 : 0;

  ModeChoice near{StepMode::kNear, {}, {}, predictor_.seconds(StepMode::kNear, load), progress};
  std::vector<ModeChoice> choices;
  if (progress > 0) choices.push_back(std::move(near));
  if (!far.rows.empty()) {
    if (has(allowed_, StepMode::kJoint)) choices.push_back(joint(snapshot, load, progress, far));
    if (has(allowed_, StepMode::kSplit)) {
      ModeChoice choice = split(snapshot, load, progress, far);
      if (!choice.far.empty() || !choice.second.empty()) choices.push_back(std::move(choice));
    }
  }
  // Of equals the plainest; a row that is due takes part in what is best with it.
  if (far.due > 0 && choices.size() > 1 && choices.front().mode == StepMode::kNear) {
    choices.erase(choices.begin());
  }
  if (choices.empty()) return {};
  const auto chosen = [&] {
    const auto is = [](StepMode mode) {
      return [mode](const ModeChoice& choice) { return choice.mode == mode; };
    };
    if (forced_) {
      const auto wanted = std::find_if(choices.begin(), choices.end(), is(*forced_));
      if (wanted != choices.end()) return wanted;
    }
    const auto best = std::max_element(
        choices.begin(), choices.end(),
        [&](const ModeChoice& a, const ModeChoice& b) { return per_second(a) < per_second(b); });
    const auto last = std::find_if(choices.begin(), choices.end(), is(last_));
    const bool stays = last != choices.end() && per_second(*last) >= kStay * per_second(*best);
    return stays ? last : best;
  }();
  last_ = chosen->mode;
  return std::move(*chosen);
}

double ModeChooser::rate(int64_t near, int64_t far, const RequestShape& shape) const {
  double most = 0;
  for (size_t mode = 0; mode < allowed_.size(); ++mode) {
    if (!allowed_.test(mode)) continue;
    most = std::max(most,
                    predictor_.steady_rate(static_cast<StepMode>(mode), static_cast<double>(near),
                                           static_cast<double>(far), shape));
  }
  return most;
}

int64_t ModeChooser::far_requests(int64_t near, int64_t most, const RequestShape& shape) const {
  std::vector<std::pair<int64_t, double>> rates;  // some counts, and what they bring
  double best = rate(near, 0, shape) / kStay;
  for (int64_t far = 1; far <= most; far += std::max<int64_t>(1, far / 16)) {
    rates.emplace_back(far, rate(near, far, shape));
    best = std::max(best, rates.back().second);
  }
  for (const auto& [far, tokens] : rates) {
    if (tokens >= kEnough * best) return far;
  }
  return 0;
}

}  // namespace helm
