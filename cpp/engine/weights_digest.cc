#include "engine/weights_digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "cpu/compression.h"
#include "cpu/stage.h"
#include "cpu/weight_format.h"

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

// Bytes of a compressed bf16 matrix as they are when it is not. Those asked for may begin within a
// weight and go on in the next rows.
void read_plain(const cpu::KernelTable& kernels, const TensorSpec& tensor, const std::byte* data,
                int64_t offset, int64_t bytes, std::byte* out) {
  const int64_t cols = tensor.shape[1];
  const auto matrix = cpu::CompressedMatrix::at(data, tensor.shape[0], cols);
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
    const int64_t bytes = std::min(kPlaceBytes, plan.tensors[t].bytes());
    const DeviceAddress here = weights.on_cpu()[t];
    const DeviceAddress there = weights.on_accelerator()[t];
    if (here == DeviceAddress::kNull && there == DeviceAddress::kNull) continue;  // no op reads it
    for (int64_t i = 0; i < kPlaces; ++i) {
      const int64_t offset = (plan.tensors[t].bytes() - bytes) * i / (kPlaces - 1);
      const TensorSpec& tensor = plan.tensors[t];
      if (here != DeviceAddress::kNull && cpu::is_compressed(plan, tensor)) {
        read_plain(kernels, tensor, cpu::host_pointer(here), offset, bytes, place.data());
      } else if (here != DeviceAddress::kNull) {
        std::memcpy(place.data(), cpu::host_pointer(here) + offset, static_cast<size_t>(bytes));
      } else {
        stream->download(place.data(), there + offset, bytes);
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
