// Stands in for libcuda.so.1 beside the emulation of the CUDA runtime: a driver of CUDA 13.0.
extern "C" __attribute__((visibility("default"))) int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
