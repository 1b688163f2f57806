#include "serve/step_mode.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace helm {

// What is to be chosen for.
struct ModeChooser::Situation {
  const ModeSnapshot& snapshot;
  StepLoad load;            // of near rows and prompts
  double progress = 0;      // of those
  std::vector<size_t> far;  // in the order in which they join, at most as many as there is room for
  size_t due = 0;           // of those, that take part whatever it costs: the first
};

ModeSet executed_modes() {
  ModeSet modes;
  for (const StepMode mode : kExecutedModes) modes.set(static_cast<size_t>(mode));
  return modes;
}

ModeChooser::ModeChooser(Predictor predictor, ModeSet allowed)
    : predictor_(std::move(predictor)), allowed_(allowed.set(0)) {}

double ModeChooser::per_second(const ModeChoice& choice) const {
  return seconds(choice) > 0 ? choice.progress / seconds(choice) : 0;
}

// What the step brings: tokens a second or, given the rate of others, tokens less those that others
// bring in its time.
double ModeChooser::value(const ModeChoice& choice, double rate) const {
  return rate > 0 ? choice.progress - rate * seconds(choice) : per_second(choice);
}

void ModeChooser::note(const ModeChoice& choice, double measured_s) {
  if (!(choice.table_s > 0) || !(measured_s > 0)) return;
  predictor_.note(choice.mode, choice.table_s, measured_s);
  tokens_ += kLatest * (choice.progress - tokens_);
  seconds_ += kLatest * (seconds(choice) - seconds_);
}

// Of the first so many rows, as many as bring most.
ModeChoice ModeChooser::joint(const Situation& now, double rate) const {
  StepLoad load = now.load;
  ModeChoice best;
  double most = -std::numeric_limits<double>::infinity();
  size_t kept = 0, taken = 0;
  for (const size_t row : now.far) {
    predictor_.add(load.far[0], static_cast<double>(now.snapshot.rows[row].length));
    ++load.outputs;
    ++taken;
    if (taken < now.due) continue;
    const ModeChoice choice{StepMode::kJoint,
                            {},
                            {},
                            predictor_.seconds(StepMode::kJoint, load),
                            now.progress + static_cast<double>(taken)};
    if (value(choice, rate) <= most) continue;
    most = value(choice, rate), best = choice, kept = taken;
  }
  best.far.assign(now.far.begin(), now.far.begin() + static_cast<std::ptrdiff_t>(kept));
  return best;
}

// Each row goes to the sub-batch under which the CPU is hidden by more, if it stays hidden there. A
// row is passed over that is no shorter than one that found no place. With nothing near there is
// nothing to hide under, and sub-batches take turns.
ModeChoice ModeChooser::split(const Situation& now, double rate) const {
  StepLoad load = now.load;
  const bool alone = load.near.rows + load.prompt_rows == 0;
  std::vector<std::pair<size_t, size_t>> taken;  // row, sub-batch
  ModeChoice best;
  double most = -std::numeric_limits<double>::infinity();
  size_t kept = 0;
  int64_t refused = std::numeric_limits<int64_t>::max();  // positions
  for (size_t i = 0; i < now.far.size(); ++i) {
    const int64_t length = now.snapshot.rows[now.far[i]].length;
    const bool due = i < now.due;
    if (!due && !alone && length >= refused) continue;
    const auto hidden = predictor_.hidden_s(load);
    const size_t batch = load.far[1].rows == 0 || hidden[1] > hidden[0] ? 1 : 0;
    predictor_.add(load.far[batch], static_cast<double>(length));
    const auto left = predictor_.hidden_s(load);
    if (!due && !alone && std::min(left[0], left[1]) < 0) {
      predictor_.add(load.far[batch], static_cast<double>(length), -1);
      refused = length;
      continue;
    }
    ++load.outputs;
    taken.emplace_back(now.far[i], batch);
    if (i + 1 < now.due) continue;
    const ModeChoice choice{StepMode::kSplit,
                            {},
                            {},
                            predictor_.seconds(StepMode::kSplit, load),
                            now.progress + static_cast<double>(taken.size())};
    if (value(choice, rate) <= most) continue;
    most = value(choice, rate), best = choice, kept = taken.size();
  }
  for (size_t i = 0; i < kept; ++i) {
    (taken[i].second == 1 ? best.second : best.far).push_back(taken[i].first);
  }
  return best;
}

// The best of each mode, the plainest first.
std::vector<ModeChoice> ModeChooser::choices(const Situation& now, double rate) const {
  std::vector<ModeChoice> choices;
  if (!now.far.empty()) {
    if (has(allowed_, StepMode::kJoint)) choices.push_back(joint(now, rate));
    if (has(allowed_, StepMode::kSplit)) {
      ModeChoice choice = split(now, rate);
      if (!choice.far.empty() || !choice.second.empty()) choices.push_back(std::move(choice));
    }
  }
  // A row that is due takes part in what is best with it.
  if (now.progress > 0 && (now.due == 0 || choices.empty())) {
    choices.insert(
        choices.begin(),
        {StepMode::kNear, {}, {}, predictor_.seconds(StepMode::kNear, now.load), now.progress});
  }
  return choices;
}

ModeChoice ModeChooser::choose(const ModeSnapshot& snapshot) {
  Situation now{snapshot, predictor_.load(), 0, {}, 0};
  for (size_t i = 0; i < snapshot.rows.size(); ++i) {
    const ModeRow& row = snapshot.rows[i];
    if (row.far) {
      now.far.push_back(i);
      continue;
    }
    predictor_.add(now.load.near, static_cast<double>(row.length));
    ++now.load.outputs;
    ++now.progress;
  }
  for (const ModePrompt& prompt : snapshot.prompts) {
    predictor_.add_prompt(now.load, static_cast<double>(prompt.past),
                          static_cast<double>(prompt.tokens), prompt.far);
    now.load.outputs += prompt.output ? 1 : 0;
    now.progress += static_cast<double>(prompt.tokens) / static_cast<double>(prompt.whole);
  }
  const double without_s =
      predictor_.corrected_s(StepMode::kNear, predictor_.seconds(StepMode::kNear, now.load));
  const auto late = [&](size_t i) {
    const double waits_s = snapshot.rows[i].waited_s + without_s;
    return snapshot.usual_s > 0 && waits_s > kMostWait * snapshot.usual_s;
  };
  const auto urgency = [&](size_t i) {
    const int64_t skips = snapshot.rows[i].skips;
    return std::tuple(late(i), skips >= kMostSkips, skips);
  };
  std::stable_sort(now.far.begin(), now.far.end(),
                   [&](size_t a, size_t b) { return urgency(a) > urgency(b); });
  const int64_t rows =
      snapshot.most_rows - static_cast<int64_t>(now.load.near.rows + now.load.prompt_rows);
  const int64_t outputs = snapshot.most_outputs - static_cast<int64_t>(now.load.outputs);
  const auto room = static_cast<size_t>(std::max<int64_t>(0, std::min(rows, outputs)));
  if (now.far.size() > room) now.far.resize(room);
  now.due = static_cast<size_t>(std::count_if(now.far.begin(), now.far.end(), late));
  if (now.due == 0 && !now.far.empty() && std::get<1>(urgency(now.far.front()))) now.due = 1;

  std::vector<ModeChoice> choices = this->choices(now, 0);
  if (choices.empty()) return {};
  double rate = seconds_ > 0 ? tokens_ / seconds_ : 0;
  const auto reaches = [&](const ModeChoice& choice) { return per_second(choice) >= rate; };
  if (std::any_of(choices.begin(), choices.end(), reaches)) {
    rate = 0;
  } else {
    choices = this->choices(now, rate);
  }
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
        [&](const auto& a, const auto& b) { return value(a, rate) < value(b, rate); });
    const auto last = std::find_if(choices.begin(), choices.end(), is(last_));
    if (last == choices.end()) return best;
    const double spare = (1 - kStay) * (rate > 0 ? rate * seconds(*last) : per_second(*best));
    return value(*last, rate) + spare >= value(*best, rate) ? last : best;
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
  double best = rate(near, 0, shape) / kPays;
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
