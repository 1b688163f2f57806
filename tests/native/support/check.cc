// Guarded memory by mmap; comparison that fails unless every element is shown to be within bounds.
#include "support/check.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <sstream>

namespace helm::test {
namespace {
constexpr unsigned char kMargin = 0xa5;
}

GuardedBytes::GuardedBytes(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t body = (bytes + page - 1) / page * page + page;
  mapped_ = body + page;
  void* p = mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<unsigned char*>(p);
  std::memset(base_, kMargin, static_cast<size_t>(body));
  mprotect(base_ + body, static_cast<size_t>(page), PROT_NONE);
  data_ = base_ + body - bytes;
}

GuardedBytes::~GuardedBytes() {
  munmap(base_, static_cast<size_t>(mapped_));
}

bool GuardedBytes::intact() const {
  for (const unsigned char* p = base_; p < data_; ++p) {
    if (*p != kMargin) return false;
  }
  return true;
}

std::vector<float> random_floats(int64_t n, uint32_t seed, Fill fill) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> unit(-1.0f, 1.0f);
  std::uniform_int_distribution<int> exponent(-6, 6);
  std::vector<float> out(static_cast<size_t>(n));
  for (size_t i = 0; i < out.size(); ++i) {
    const float u = unit(rng);
    switch (fill) {
      case Fill::kSigned:
        out[i] = u;
        break;
      case Fill::kCancelling:
        out[i] = (i % 2 ? 1.0f : -1.0f) * (1.0f + u / 64);
        break;
      case Fill::kLarge:
        out[i] = std::ldexp(u, exponent(rng));
        break;
    }
  }
  return out;
}

std::string compare(const std::vector<float>& got, const std::vector<double>& want,
                    const std::vector<double>& bound, const std::string& label) {
  std::ostringstream text;
  text.precision(9);
  if (got.size() != want.size() || bound.size() != want.size()) {
    text << label << ": sizes " << got.size() << ", " << want.size() << ", " << bound.size();
    return text.str();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const double err = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(err <= bound[i])) {
      text << label << ": element " << i << " is " << got[i] << ", expected " << want[i] << " +- "
           << bound[i];
      return text.str();
    }
  }
  return "";
}

std::string compare_bits(const std::vector<float>& got, const std::vector<float>& want,
                         const std::string& label) {
  std::ostringstream text;
  text.precision(9);
  if (got.size() != want.size()) {
    text << label << ": sizes " << got.size() << ", " << want.size();
    return text.str();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(want[i])) {
      text << label << ": element " << i << " is " << got[i] << ", expected the bits of "
           << want[i];
      return text.str();
    }
  }
  return "";
}

}  // namespace helm::test
