#include "device/registry.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "cpu/isa.h"
#include "device/cuda_loader.h"
#include "device/sim_device.h"

namespace helm {
namespace {

using Unit = std::pair<std::string_view, double>;

constexpr std::array<Unit, 9> kSizes = {{{"GiB", 1073741824.0},
                                         {"MiB", 1048576.0},
                                         {"KiB", 1024.0},
                                         {"GB", 1e9},
                                         {"MB", 1e6},
                                         {"KB", 1e3},
                                         {"G", 1073741824.0},
                                         {"M", 1048576.0},
                                         {"B", 1.0}}};
constexpr std::array<Unit, 4> kTimes = {{{"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}, {"s", 1.0}}};

// "name=value" of a specification.
struct Option {
  std::string_view name;
  std::string_view value;
  const std::string& specification;

  [[noreturn]] void reject(const char* expected) const {
    fail(ErrorKind::kInvalid, "[device] \"", specification, "\": ", name, " is \"", value,
         "\", expected ", expected);
  }

  // A positive number with one of the units, or with none.
  template <size_t N>
  double quantity(const std::array<Unit, N>& units, const char* expected) const {
    double number = 0;
    const char* end = value.data() + value.size();
    const auto [rest, error] = std::from_chars(value.data(), end, number);
    if (error != std::errc() || !std::isfinite(number) || !(number > 0)) reject(expected);
    const std::string_view unit(rest, static_cast<size_t>(end - rest));
    if (unit.empty()) return number;
    for (const auto& [text, factor] : units) {
      if (unit == text) return number * factor;
    }
    reject(expected);
  }

  double rate() {
    if (value.ends_with("/s")) value.remove_suffix(2);
    return quantity(kSizes, "a rate such as 16GB/s");
  }

  // A whole number from 1 to `most`.
  int64_t count(int64_t most) const {
    const std::string expected = "1 to " + std::to_string(most);
    const double number = quantity(std::array<Unit, 0>{}, expected.c_str());
    if (number != std::floor(number) || number > static_cast<double>(most)) {
      reject(expected.c_str());
    }
    return static_cast<int64_t>(number);
  }
};

SimOptions sim_options(const std::string& specification, std::string_view list) {
  SimOptions options;
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    const size_t equals = item.find('=');
    Option option{item.substr(0, equals), "", specification};
    if (equals != std::string_view::npos) option.value = item.substr(equals + 1);
    if (option.name == "vram") {
      const double bytes = option.quantity(kSizes, "a size such as 2GiB");
      if (bytes > 1e15) option.reject("at most 1e15 bytes");
      options.memory_bytes = static_cast<int64_t>(bytes);
    } else if (option.name == "link") {
      options.link_bytes_per_s = option.rate();
    } else if (option.name == "memory") {
      options.memory_bytes_per_s = option.rate();
    } else if (option.name == "latency") {
      options.latency_s = option.quantity(kTimes, "a time such as 10us");
      if (options.latency_s > 1) option.reject("at most one second");
    } else if (option.name == "jitter") {
      options.jitter_s = option.quantity(kTimes, "a time such as 10us");
      if (options.jitter_s > 1) option.reject("at most one second");
    } else if (option.name == "threads") {
      options.threads = static_cast<int>(option.count(1024));
    } else if (option.name == "refuse") {
      options.refused_allocation = option.count(int64_t{1} << 40);
    } else if (option.name == "lost") {
      options.lost_at_command = option.count(int64_t{1} << 40);
    } else {
      fail(ErrorKind::kInvalid, "[device] \"", specification, "\": unknown option \"", option.name,
           "\"; known are vram, link, latency, memory, threads and, for tests, jitter, refuse and "
           "lost");
    }
  }
  return options;
}

CudaOptions cuda_options(const std::string& specification, std::string_view ordinal,
                         const std::vector<std::string>& cublas_directories) {
  CudaOptions options;
  const char* end = ordinal.data() + ordinal.size();
  if (!ordinal.empty() || specification.ends_with(':')) {
    const auto [rest, error] = std::from_chars(ordinal.data(), end, options.ordinal);
    if (error != std::errc() || rest != end || options.ordinal < 0) {
      fail(ErrorKind::kInvalid, "[device] \"", specification,
           "\": expected cuda:N with the number of a GPU, counted from 0");
    }
  }
  options.blas_directories = named_cublas_directories();
  options.blas_directories.insert(options.blas_directories.end(), cublas_directories.begin(),
                                  cublas_directories.end());
  return options;
}

}  // namespace

std::unique_ptr<Device> open_accelerator(const std::string& specification,
                                         const std::vector<std::string>& cublas_directories) {
  const std::string_view whole = specification;
  const std::string_view kind = whole.substr(0, whole.find(':'));
  const std::string_view rest = whole.substr(std::min(whole.size(), kind.size() + 1));
  if (kind == "sim") {
    return std::make_unique<SimDevice>(sim_options(specification, rest), cpu::select_kernels());
  }
  if (kind == "cuda") {
    return open_cuda(cuda_options(specification, rest, cublas_directories));
  }
  fail(ErrorKind::kInvalid, "[device] unknown device \"", specification,
       "\"; expected cuda, cuda:N or sim:vram=SIZE,link=RATE");
}

}  // namespace helm
