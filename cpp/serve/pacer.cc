#include "serve/pacer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace helm {
namespace {

constexpr double kKept = 0.98;         // weight of earlier steps in the costs, with each step
constexpr double kLatestRatio = 0.15;  // of the last step in the correction
constexpr double kLatestDeviation = 0.05;
constexpr double kLatestDecode = 0.015;  // and in what is known of those without prompts, in a row
constexpr int kSweeps = 16;              // through the costs, with each step
// What every step takes, and what pairs take, is told from rows by steps that differ in these by
// more than noise: some 3 %.
constexpr double kNoise = 0.03 * 0.03;

}  // namespace

double Pacer::seconds(const Terms& terms) const {
  return std::inner_product(terms.begin(), terms.end(), cost_s_.begin(), 0.0);
}

void Pacer::note(int64_t decode_rows, const PromptWork& prompts, double seconds) {
  if (!(seconds > 0)) return;
  if (prompts.rows == 0) {
    if (decode_rows == 0) return;
    // Those before count less, the longer ago they were; the first ones alike.
    const double kept = std::min(std::pow(1 - kLatestDecode, 1.0 + static_cast<double>(since_)),
                                 static_cast<double>(without_) / static_cast<double>(without_ + 1));
    decode_s_ = kept * decode_s_ + (1 - kept) * seconds;
    mean_rows_ = kept * mean_rows_ + (1 - kept) * static_cast<double>(decode_rows);
    decode_rows_ = latest_rows_ = decode_rows;
    ++without_;
    since_ = 0;
    return;
  }
  latest_rows_ = decode_rows;
  ++since_;
  const Terms step = terms(prompts);
  const double told_s = this->seconds(step);
  if (told_s > 0) {
    const double off = std::abs(seconds / (told_s * correction_) - 1);
    deviation_ += kLatestDeviation * (std::min(off, 1.0) - deviation_);
    correction_ += kLatestRatio * (seconds / told_s - correction_);
  }
  for (size_t i = 0; i < step.size(); ++i) {
    for (size_t j = 0; j < step.size(); ++j) {
      products_[i][j] = kKept * products_[i][j] + step[i] * step[j];
    }
    seconds_[i] = kKept * seconds_[i] + step[i] * seconds;
  }
  fit();
}

// Costs of least squares that are not negative, term by term from those before. Rows come first:
// they have what the steps do not tell apart.
void Pacer::fit() {
  const Terms& sums = products_[0];
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (const size_t i : {1, 0, 2}) {
      const double others =
          std::inner_product(cost_s_.begin(), cost_s_.end(), products_[i].begin(), 0.0) -
          cost_s_[i] * products_[i][i];
      const double noise = i == 1 ? 0 : kNoise * sums[i] * sums[i] / sums[0];
      const double most =
          i == 0 && !reads_more_ && decode_s_ > 0 ? decode_s_ : std::numeric_limits<double>::max();
      cost_s_[i] = std::clamp((seconds_[i] - others) / (products_[i][i] + noise), 0.0, most);
    }
  }
}

bool Pacer::measures() const {
  if (target_s_ > 0) return false;
  return decode_s_ == 0 || since_ >= (latest_rows_ == decode_rows_ ? kMostAlike : kMostUnlike);
}

// A row more costs what one of a prompt costs, but no more than others do on average.
double Pacer::full_s(int64_t running) const {
  const double more = static_cast<double>(running) - mean_rows_;
  if (without_ == 0 || more <= 0) return decode_s_;
  return decode_s_ + more * std::min(cost_s_[1], decode_s_ / mean_rows_);
}

double Pacer::target_s(int64_t running) const {
  if (target_s_ > 0) return target_s_;
  const double slowdown = std::min(kSlowdown, kMostSlowdown / (1 + kTail * deviation_));
  return std::max(slowdown * full_s(running), kLeastTarget_s);
}

int64_t Pacer::rows(int64_t past, int64_t running, double waited_s) const {
  const double steps = products_[0][0];
  if (steps == 0) return std::min(kFirstRows, most_rows_);
  const auto [step_s, row_s, pair_s] = cost_s_;
  const double behind_s = std::max(row_s + pair_s * static_cast<double>(past), 1e-12);  // a row
  const double target_s = (this->target_s(running) - waited_s) / correction_;
  // step_s + behind_s n + pair_s n^2 / 2 = target_s
  const double left_s = std::max(0.0, target_s - step_s);
  const double fitting =
      2 * left_s / (behind_s + std::sqrt(behind_s * behind_s + 2 * pair_s * left_s));

  return static_cast<int64_t>(std::clamp(std::max(fitting, least(past)),
                                         static_cast<double>(std::min(kLeastRows, most_rows_)),
                                         static_cast<double>(most_rows_)));
}

// Where prompts read no more, the target leaves them half of their speed anyway.
double Pacer::least(int64_t past) const {
  if (!reads_more_) return 0;
  PromptWork whole;
  whole.add(past, most_rows_);
  const auto [step_s, row_s, pair_s] = cost_s_;
  const double behind_s = row_s + pair_s * static_cast<double>(past);
  const double half_rate = static_cast<double>(most_rows_) / seconds(terms(whole)) / 2;
  return half_rate * step_s / (1 - half_rate * behind_s);
}

}  // namespace helm
