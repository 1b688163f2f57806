#include "serve/pacer.h"

#include <algorithm>

namespace helm {
namespace {

constexpr double kKept = 0.9;     // weight of what was, with each step
constexpr double kSpread = 0.15;  // of the rows, relative, from which on a slope can be told

}  // namespace

void Pacer::note(int64_t decode_rows, int64_t prompt_rows, double seconds) {
  if (!(seconds > 0)) return;
  if (prompt_rows == 0) {
    if (decode_rows == 0) return;
    decode_s_ = decode_s_ == 0 ? seconds : kKept * decode_s_ + (1 - kKept) * seconds;
    return;
  }
  const auto rows = static_cast<double>(prompt_rows);
  for (double* sum : {&weight_, &rows_, &seconds_, &rows_squared_, &rows_seconds_}) *sum *= kKept;
  weight_ += 1;
  rows_ += rows;
  seconds_ += seconds;
  rows_squared_ += rows * rows;
  rows_seconds_ += rows * seconds;
}

int64_t Pacer::rows() const {
  if (weight_ == 0) return std::min(kFirstRows, most_rows_);
  const double mean_rows = rows_ / weight_, mean_s = seconds_ / weight_;
  const double variance = rows_squared_ / weight_ - mean_rows * mean_rows;
  const double together = rows_seconds_ / weight_ - mean_rows * mean_s;
  const double through_zero = mean_s / mean_rows;
  const bool told = variance > kSpread * kSpread * mean_rows * mean_rows;
  const double row_s =
      told ? std::clamp(together / variance, 1e-3 * through_zero, through_zero) : through_zero;
  const double fixed_s = std::max(0.0, mean_s - row_s * mean_rows);

  const double target_s =
      target_s_ > 0 ? target_s_ : std::max(kSlowdown * decode_s_, kLeastTarget_s);
  const auto most = static_cast<double>(most_rows_);
  const double half_rate = most / (fixed_s + row_s * most) / 2;  // rows per second
  const double least = half_rate * fixed_s / (1 - half_rate * row_s);
  const double rows = std::max((target_s - fixed_s) / row_s, least);
  return static_cast<int64_t>(
      std::clamp(rows, static_cast<double>(std::min(kLeastRows, most_rows_)), most));
}

}  // namespace helm
