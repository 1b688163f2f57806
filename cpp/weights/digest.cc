#include "weights/digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "cpu/compression.h"
#include "cpu/stage.h"

namespace helm {
namespace {

constexpr int64_t kPlaces = 4;  // of each tensor, evenly spaced
constexpr int64_t kPlaceBytes = 32;

// FNV-1a.
uint64_t hash(uint64_t state, const std::byte* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    state = (state ^ static_cast<uint64_t>(data[i])) * 1099511628211U;
  }
  return state;
}

// Bytes of a matrix of bf16c as they are in bf16. Those asked for may begin within a weight and go
// on in the next rows.
void read_plain(const cpu::KernelTable& kernels, const TensorSpec& tensor, const std::byte* data,
                int64_t offset, int64_t bytes, std::byte* out) {
  const int64_t cols = tensor.cols();
  const auto matrix = cpu::CompressedMatrix::at(data, tensor.rows(), cols);
  for (int64_t i = 0; i < bytes; ++i) {
    const int64_t element = (offset + i) / int64_t{sizeof(uint16_t)};
    uint16_t weight = 0;
    cpu::read_compressed(kernels, matrix, element / cols, element % cols, 1, &weight);
    std::memcpy(out + i, reinterpret_cast<const std::byte*>(&weight) + (offset + i) % 2, 1);
  }
}

}  // namespace

std::string weights_digest(const Plan& plan, const Weights& weights,
                           const cpu::KernelTable& kernels, Device* accelerator) {
  const std::unique_ptr<Stream> stream = accelerator ? accelerator->create_stream() : nullptr;
  uint64_t state = 14695981039346656037U;
  std::array<std::byte, kPlaceBytes> place{};
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const TensorSpec& tensor = plan.tensors[t];
    const Weight& here = weights.on(kCpu)[t];
    const bool on_cpu = here.address != DeviceAddress::kNull;
    const Weight& there = accelerator ? weights.on(Plan::kFirstAccelerator)[t] : here;
    if (!on_cpu && there.address == DeviceAddress::kNull) continue;  // no op reads it
    // The order of bf16c's bytes is the isa's.
    const bool compressed = on_cpu && here.format.codes == Codes::kBF16C;
    const Format format = compressed ? format_of(DType::kBF16) : (on_cpu ? here : there).format;
    const int64_t all = format_bytes(format, tensor.rows(), tensor.cols());
    const int64_t bytes = std::min(kPlaceBytes, all);
    for (int64_t i = 0; i < kPlaces; ++i) {
      const int64_t offset = (all - bytes) * i / (kPlaces - 1);
      if (compressed) {
        read_plain(kernels, tensor, cpu::host_pointer(here.address), offset, bytes, place.data());
      } else if (on_cpu) {
        std::memcpy(place.data(), cpu::host_pointer(here.address) + offset,
                    static_cast<size_t>(bytes));
      } else {
        stream->download(place.data(), there.address + offset, bytes);
        stream->synchronize();
      }
      state = hash(state, place.data(), bytes);
    }
  }
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << state;
  return text.str();
}

}  // namespace helm
