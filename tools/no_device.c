/* Stands for libcuda: every call succeeds, nothing runs. For measuring what a launch costs the host
   (tools/host_time.py). Signatures are those of the driver API. */
#include <stddef.h>
#include <stdint.h>

typedef int result;

static int object; /* what every handle points to */

result cuInit(unsigned flags) { return 0; }
result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
result cuGetErrorString(result code, const char **text) { *text = "none"; return 0; }
result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
result cuDeviceGetCount(int *count) { *count = 1; return 0; }
result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &object; return 0; }
result cuCtxGetCurrent(void **context) { *context = &object; return 0; }
result cuCtxSetCurrent(void *context) { return 0; }
result cuCtxGetDevice(int *device) { *device = 0; return 0; }
result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
result cuCtxSetLimit(int limit, size_t value) { return 0; }
result cuModuleLoadData(void **module, const void *image) { *module = &object; return 0; }
result cuModuleUnload(void *module) { return 0; }
result cuModuleGetFunction(void **function, void *module, const char *name) { *function = &object; return 0; }
result cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
result cuFuncSetCacheConfig(void *function, int config) { return 0; }
result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }

result cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 16 ? 132 : 232448; /* multiprocessors; else shared memory of a block */
  return 0;
}
result cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0; /* threads of a block; else bytes, registers */
  return 0;
}
result cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer) {
  *(uintptr_t *)value = pointer;
  return 0;
}
result cuLaunchKernel() { return 0; }
result cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { return 0; }
