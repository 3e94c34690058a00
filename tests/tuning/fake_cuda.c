/* A CUDA driver whose device memory is the host's and whose only kernel computes y[i] = x[i] + 1.
   The kernel's behaviour is spelled in the image: "fault" faults at the next synchronisation, "refused" does not load. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int current = 0, pending = 0, launches = 0;
static uint64_t clock_ns = 0;
struct module { char text[64]; };

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &current; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Fake GPU", size); return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 38 ? 4096 : -1;
  return 0;
}
int cuModuleLoadData(void **module, const char *image) {
  if (strstr(image, "refused")) return 200;
  struct module *loaded = calloc(1, sizeof *loaded);
  strncpy(loaded->text, image, sizeof loaded->text - 1);
  *module = loaded;
  return 0;
}
int cuModuleUnload(void *module) { free(module); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = module;
  return strcmp(name, "kernel") == 0 ? 0 : 500;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return value > 232448 ? 1 : 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 42; return 0; }
int cuLaunchKernel(struct module *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  if (stream || extra || gx * bx < 64 || gy != 1 || bz != 1) return 1;
  if (strstr(function->text, "fault")) pending = 700;
  if (pending) return pending;
  const float *x = *(float **)arguments[0];
  float *y = *(float **)arguments[1];
  int32_t count = *(int32_t *)arguments[2];
  float addend = *(float *)arguments[3];
  if (*(uint64_t *)arguments[4]) return 1;
  for (int i = 0; i < count; i++) y[i] = x[i] + addend;
  launches++;
  clock_ns += strstr(function->text, "fast") ? 10000 : 20000;
  return 0;
}
int cuCtxSynchronize(void) { return pending; }
int cuMemAlloc_v2(uint64_t *pointer, size_t size) { *pointer = (uint64_t)calloc(1, size); return *pointer ? 0 : 2; }
int cuMemFree_v2(uint64_t pointer) { free((void *)pointer); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)to, from, size); return pending; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)from, size); return pending; }
int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t size, void *stream) { memset((void *)to, byte, size); return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = calloc(1, 8); return 0; }
int cuEventRecord(uint64_t *event, void *stream) { *event = clock_ns; return 0; }
int cuEventSynchronize(uint64_t *event) { return pending; }
int cuEventElapsedTime(float *ms, uint64_t *begin, uint64_t *end) { *ms = (*end - *begin) / 1e6f; return 0; }
int cuGetErrorName(int status, const char **name) {
  *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : status == 200 ? "CUDA_ERROR_INVALID_IMAGE"
        : status == 500 ? "CUDA_ERROR_NOT_FOUND" : status == 101 ? "CUDA_ERROR_INVALID_DEVICE" : NULL;
  return *name ? 0 : 1;
}
