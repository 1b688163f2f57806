// Stands in for libcublas.so.13 where a test opens a device but multiplies nothing.
#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cublasCreate_v2(void** handle) {
  static int token;
  *handle = &token;
  return 0;
}
EXPORT int cublasDestroy_v2(void*) {
  return 0;
}
EXPORT int cublasSetStream_v2(void*, void*) {
  return 0;
}
EXPORT int cublasSetWorkspace_v2(void*, void*, size_t) {
  return 0;
}
EXPORT int cublasGemmEx_64() {
  return 15;
}
EXPORT const char* cublasGetStatusName(int) {
  return "FAKE_NOT_SUPPORTED";
}
