// Element types and the error type that every part of HELM shares.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#define HELM_API __attribute__((visibility("default")))   // what the library exports
#define HELM_LOCAL __attribute__((visibility("hidden")))  // of an exported class, what it does not

namespace helm {

// Element type of weights and KV cache. Activations and accumulators are always f32. i8 is for the
// KV cache alone: integers of -127 to 127 with an f32 scale per row of K or V, that is per position
// and KV head.
enum class DType : uint8_t { kF32, kF16, kBF16, kI8 };
inline constexpr int kDTypes = 3;    // of weights, the first ones
inline constexpr int kKvDTypes = 4;  // of the KV cache

constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kI8 ? 1 : 2;
}
// What a row of K or V takes beside its elements.
constexpr int64_t kv_scale_bytes(DType dtype) {
  return dtype == DType::kI8 ? 4 : 0;
}
HELM_API const char* dtype_name(DType dtype);  // "f32", "f16", "bf16", "i8"
// Of weights, and of the KV cache; each throws Error for any other name.
HELM_API DType dtype_from_name(std::string_view name);
HELM_API DType kv_dtype_from_name(std::string_view name);

// What went wrong, so that a caller can react by kind rather than by text.
enum class ErrorKind : uint8_t {
  kInvalid,      // an argument, a plan or a file is malformed
  kMemory,       // a budget or the machine does not hold what was asked
  kCapacity,     // a sequence or batch exceeds a limit of the plan (context, pages, sequences)
  kIo,           // a file cannot be read or written
  kDevice,       // a device cannot be had or has failed
  kCompression,  // weights do not compress
  kAbsent,       // there is no such kind of device: no driver for it, or no plugin in this build
};

// Every failure of the public interface, of one line: [place] operation, observed, expected,
// remedy. Where a header says "Throws kIo", it is an Error of that kind. Besides, callbacks' own
// exceptions pass through, and std::bad_alloc where memory for small things runs out. Objects that
// one is given by reference must outlive it.
class HELM_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace helm
