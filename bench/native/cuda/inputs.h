// What cases are made of and checked by: values on the device, copies of them, and a message.
#pragma once

#include <string>
#include <vector>

#include "cases.h"

namespace helm::bench {

const char* name_of(DType dtype);

// Fills with small finite values of a 16-bit or 32-bit format, of about 0.01, made on the device.
void fill(const DeviceBuffer& buffer, DType dtype);
void upload(const DeviceBuffer& to, const std::vector<int32_t>& from);
template <class T>
std::vector<T> download(const void* from, int64_t n) {
  std::vector<T> out(static_cast<size_t>(n));
  check(cudaMemcpy(out.data(), from, out.size() * sizeof(T), cudaMemcpyDefault), "download");
  return out;
}

float widened(DType dtype, const void* data, int64_t i);

// Throws Error that names the case, the element and both values, unless `right`.
void require(bool right, const std::string& name, int64_t i, double got, double want);

}  // namespace helm::bench
