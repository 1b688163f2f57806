// Test tools: guarded memory, seeded inputs, comparison under per-element bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/this_build.h"

namespace helm::test {

// All of `values`; of a few the first, every fourth after it, and the last.
template <class T>
std::vector<T> sampled(std::initializer_list<T> values) {
  std::vector<T> some;
  for (const T& value : values) {
    const auto i = &value - values.begin();
    if (!kFew || i % 4 == 0 || &value + 1 == values.end()) some.push_back(value);
  }
  return some;
}

template <class T, size_t N>
std::vector<T> sampled(const T (&values)[N]) {
  std::vector<T> some;
  for (size_t i = 0; i < N; ++i) {
    if (!kFew || i % 4 == 0 || i + 1 == N) some.push_back(values[i]);
  }
  return some;
}

// All pairs of values; of a few the sampled ones side by side, each at least once.
template <class A, class B>
std::vector<std::pair<A, B>> combined(std::initializer_list<A> first,
                                      std::initializer_list<B> second) {
  const std::vector<A> a = sampled(first);
  const std::vector<B> b = sampled(second);
  std::vector<std::pair<A, B>> pairs;
  if (kFew) {
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
      pairs.emplace_back(a[i % a.size()], b[i % b.size()]);
    }
    return pairs;
  }
  for (const A& x : a) {
    for (const B& y : b) pairs.emplace_back(x, y);
  }
  return pairs;
}

// Bytes that end right before an unreadable page, so that reading past them faults, with a filled
// margin in front that `intact` checks.
class GuardedBytes {
 public:
  explicit GuardedBytes(int64_t bytes);
  ~GuardedBytes();
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  void* data() const { return data_; }
  bool intact() const;

 private:
  unsigned char* base_;
  unsigned char* data_;
  int64_t mapped_;
};

template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t n) : bytes_(n * static_cast<int64_t>(sizeof(T))), size_(n) {}
  explicit Guarded(const std::vector<T>& from) : Guarded(static_cast<int64_t>(from.size())) {
    for (int64_t i = 0; i < size_; ++i) data()[i] = from[static_cast<size_t>(i)];
  }
  T* data() const { return static_cast<T*>(bytes_.data()); }
  int64_t size() const { return size_; }
  bool intact() const { return bytes_.intact(); }
  std::vector<T> copy() const { return std::vector<T>(data(), data() + size_); }

 private:
  GuardedBytes bytes_;
  int64_t size_;
};

enum class Fill { kSigned, kCancelling, kLarge };
inline constexpr Fill kFills[] = {Fill::kSigned, Fill::kCancelling, Fill::kLarge};

// Signed: +-1. Cancelling: alternating signs of nearly equal size. Large: +-1 times 2^-6..2^6.
std::vector<float> random_floats(int64_t n, uint32_t seed, Fill fill = Fill::kSigned);

// Empty if |got - want| <= bound for every element (so a NaN fails), else index, values and label.
std::string compare(const std::vector<float>& got, const std::vector<double>& want,
                    const std::vector<double>& bound, const std::string& label);
// Empty if the bytes agree.
std::string compare_bits(const std::vector<float>& got, const std::vector<float>& want,
                         const std::string& label);

}  // namespace helm::test
