// Element types and the error type that every part of HELM shares.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#if defined(_WIN32)
#define HELM_API
#else
#define HELM_API __attribute__((visibility("default")))
#endif

namespace helm {

// Element type of weights and KV cache. Activations and accumulators are always f32.
enum class DType : uint8_t { kF32, kF16, kBF16 };
inline constexpr int kDTypes = 3;

constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}
HELM_API const char* dtype_name(DType dtype);           // "f32", "f16", "bf16"
HELM_API DType dtype_from_name(std::string_view name);  // throws Error for any other name

// What went wrong, so that a caller can react by kind rather than by text.
enum class ErrorKind : uint8_t {
  kInvalid,   // an argument, a plan or a file is malformed
  kMemory,    // a budget or the machine does not hold what was asked
  kCapacity,  // a sequence or batch exceeds a limit of the plan (context, pages, sequences)
  kIo,        // a file cannot be read or written
  kDevice,    // a device cannot be had or has failed
};

// Every failure of the public interface. The message says operation, observed, expected, remedy.
class HELM_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace helm
