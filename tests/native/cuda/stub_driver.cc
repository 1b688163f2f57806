// Stands in for libcuda.so.1 as the CUDA toolkit's stub of it does: every call fails.
extern "C" __attribute__((visibility("default"))) int cuDriverGetVersion(int*) {
  return 34;  // CUDA_ERROR_STUB_LIBRARY
}
