/* A strict CUDA driver whose device memory is the host's.

   Every handle is looked up, every range of device memory is checked, calls before cuInit or without a context fail, and
   after a fault every call fails for good, as on a GPU, where only the end of the process helps.

   Two kinds of image load. A text begins with "kernel:" and spells a behaviour: its only kernel, "kernel", computes
   y[i] = x[i] + addend for arguments (x, y, count, addend, 0); "fast" in it takes half the time, "fault" faults when it is
   waited for, "hang" never ends. An ELF file is a real cubin with the entry points that its text names; a launch of it
   looks at its arguments (FAKE_CUDA_ARGUMENTS: p for a pointer to memory, 0 for a null pointer, anything else for a number),
   writes a pattern that its inputs decide (FAKE_CUDA_OUTPUT=argument:bytes), and takes 20 us and a little that its code
   decides (the first loaded: the middle of what others take).

   FAKE_CUDA_FAIL_AT=n: the n-th launch of a process faults. FAKE_CUDA_WRONG_AT=n: it writes one byte wrong.
   FAKE_CUDA_EXIT_AT=n: it ends the process.
   FAKE_CUDA_LOG=file: at its end, a process appends what it did and what it never gave back. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
enum kind { MODULE = 1, FUNCTION, EVENT, DEVICE_MEMORY, HOST_MEMORY };
struct object { struct object *next; enum kind kind; char *data; size_t size; struct object *module; int dynamic_limit;
                uint64_t time_ns; int recorded, is_text; };

static struct object *objects = NULL;
static int initialised = 0, retained = 0, current = 0, sticky = 0, pending = 0;
static uint64_t clock_ns = 0;
static long launches = 0, loads = 0, calls = 0;

static long number(const char *name) { const char *text = getenv(name); return text ? atol(text) : -1; }

static struct object *make(enum kind kind, size_t size) {
  struct object *made = calloc(1, sizeof *made);
  made->kind = kind; made->size = size; made->data = size ? calloc(1, size) : NULL; made->next = objects;
  return objects = made;
}
static struct object *find(enum kind kind, const void *handle) {
  for (struct object *o = objects; o; o = o->next) if (o->kind == kind && o == handle) return o;
  return NULL;
}
static void drop(struct object *gone) {
  for (struct object **at = &objects; *at; at = &(*at)->next)
    if (*at == gone) { *at = gone->next; free(gone->data); free(gone); return; }
}
static struct object *memory(enum kind kind, uint64_t address, size_t size) {
  for (struct object *o = objects; o; o = o->next) {
    uint64_t begin = (uint64_t)o->data;
    if (o->kind == kind && address >= begin && size <= o->size && address - begin <= o->size - size) return o;
  }
  return NULL;
}
static int ready(void) {
  calls++;
  return sticky ? sticky : !initialised ? NOT_INITIALIZED : !current ? INVALID_CONTEXT : OK;
}
/* Whatever waits for the GPU learns of a fault, and nothing works after that. */
static int waited(void) { if (pending) sticky = pending; return sticky; }
#define CHECK(condition, status) do { if (!(condition)) return status; } while (0)
#define READY() do { int status_ = ready(); if (status_) return status_; } while (0)

static long count(enum kind kind) { long n = 0; for (struct object *o = objects; o; o = o->next) n += o->kind == kind; return n; }
__attribute__((destructor)) static void leave(void) {
  const char *path = getenv("FAKE_CUDA_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "{\"launches\": %ld, \"loads\": %ld, \"calls\": %ld, \"modules\": %ld, \"functions\": %ld, \"retained\": %d}\n",
          launches, loads, calls, count(MODULE), count(FUNCTION), retained);
  fclose(file);
}
/* For tests in the same process. */
long fake_count(int kind) { return count(kind); }
long fake_launches(void) { return launches; }
long fake_calls(void) { return calls; }

int cuInit(unsigned flags) { CHECK(flags == 0, INVALID_VALUE); initialised = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) {
  CHECK(initialised, NOT_INITIALIZED); CHECK(ordinal == 0 || ordinal == 1, INVALID_DEVICE);
  *device = 100 + ordinal; return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  CHECK(initialised, NOT_INITIALIZED); CHECK(device == 100 || device == 101, INVALID_DEVICE);
  retained++; *context = &retained; return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  CHECK(device == 100 || device == 101, INVALID_DEVICE); CHECK(retained > 0, INVALID_CONTEXT);
  retained--; return OK;
}
int cuCtxSetCurrent(void *context) { CHECK(context == &retained && retained > 0, INVALID_CONTEXT); current = 1; return OK; }
int cuDeviceGetName(char *name, int size, int device) {
  CHECK(initialised, NOT_INITIALIZED); CHECK(device == 100 || device == 101, INVALID_DEVICE); CHECK(size > 9, INVALID_VALUE);
  strcpy(name, "Fake GPU"); return OK;
}
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  CHECK(initialised, NOT_INITIALIZED); CHECK(device == 100 || device == 101, INVALID_DEVICE);
  CHECK(attribute == 75 || attribute == 76 || attribute == 38, INVALID_VALUE);
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 4096; return OK;
}
int cuModuleLoadData(void **module, const char *image) {
  READY();
  int is_elf = memcmp(image, "\x7f" "ELF", 4) == 0, is_text = strncmp(image, "kernel:", 7) == 0;
  CHECK((is_elf || is_text) && !(is_text && strstr(image, "refused")), INVALID_IMAGE);
  size_t size;
  if (is_elf) {  /* The section headers are the end of what ptxas writes, or the program headers behind them. */
    uint64_t sections; uint16_t each, many, program_each, programs; uint64_t program;
    memcpy(&program, image + 32, 8); memcpy(&sections, image + 40, 8);
    memcpy(&program_each, image + 54, 2); memcpy(&programs, image + 56, 2);
    memcpy(&each, image + 58, 2); memcpy(&many, image + 60, 2);
    size = sections + (size_t)each * many;
    if (program + (size_t)program_each * programs > size) size = program + (size_t)program_each * programs;
  } else size = strlen(image) + 1;
  struct object *made = make(MODULE, size);
  memcpy(made->data, image, size); made->is_text = is_text; *module = made; loads++;
  uint32_t hash = 2166136261u;
  for (size_t k = 0; k < size; k++) hash = (hash ^ (unsigned char)image[k]) * 16777619u;
  /* The first, the original, in the middle: its bytes hold the path of its source, and must not decide whether another is faster. */
  static uint32_t first = 0;
  if (loads == 1) first = hash;
  made->time_ns = 20000 + (hash - first + 100) % 200;
  return OK;
}
int cuModuleUnload(void *handle) {
  READY();
  struct object *module = find(MODULE, handle);
  CHECK(module, INVALID_HANDLE);
  for (struct object *o = objects, *next; o; o = next) { next = o->next; if (o->kind == FUNCTION && o->module == module) drop(o); }
  drop(module);
  return waited();
}
int cuModuleGetFunction(void **function, void *handle, const char *name) {
  READY();
  struct object *module = find(MODULE, handle);
  CHECK(module, INVALID_HANDLE);
  CHECK(module->is_text ? strcmp(name, "kernel") == 0 : memmem(module->data, module->size, name, strlen(name) + 1) != NULL, NOT_FOUND);
  struct object *made = make(FUNCTION, 0);
  made->module = module; made->dynamic_limit = 48 << 10; *function = made;
  return OK;
}
int cuFuncSetCacheConfig(void *function, int config) {
  READY(); CHECK(find(FUNCTION, function), INVALID_HANDLE); CHECK(config >= 0 && config <= 3, INVALID_VALUE); return OK;
}
int cuFuncSetAttribute(void *handle, int attribute, int value) {
  READY();
  struct object *function = find(FUNCTION, handle);
  CHECK(function, INVALID_HANDLE); CHECK(attribute == 8 && value >= 0 && value <= 232448, INVALID_VALUE);
  function->dynamic_limit = value; return OK;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  READY(); CHECK(find(FUNCTION, function), INVALID_HANDLE); CHECK(attribute == 1 || attribute == 4, INVALID_VALUE);
  *value = attribute == 4 ? 42 : 0; return OK;
}
static int run_text(struct object *module, void **arguments) {
  uint64_t x, y, scratch; int32_t n; float addend;
  memcpy(&x, arguments[0], 8); memcpy(&y, arguments[1], 8); memcpy(&n, arguments[2], 4); memcpy(&addend, arguments[3], 4);
  memcpy(&scratch, arguments[4], 8);
  CHECK(scratch == 0, INVALID_VALUE);
  if (strstr(module->data, "hang")) for (;;) pause();
  if (strstr(module->data, "fault") || n < 0 || !memory(DEVICE_MEMORY, x, 4 * n) || !memory(DEVICE_MEMORY, y, 4 * n))
    return pending = ILLEGAL_ADDRESS, OK;
  for (int i = 0; i < n; i++) ((float *)y)[i] = ((float *)x)[i] + addend;
  if (number("FAKE_CUDA_WRONG_AT") == launches) ((char *)y)[5] ^= 1;
  clock_ns += strstr(module->data, "fast") ? 10000 : 20000;
  return OK;
}
static int run_cubin(struct object *module, void **arguments) {
  const char *kinds = getenv("FAKE_CUDA_ARGUMENTS"), *output = getenv("FAKE_CUDA_OUTPUT");
  uint64_t sum = 0, pointer, out = 0, size = 0; int at = -1;
  if (output) sscanf(output, "%d:%lu", &at, &size);
  for (int i = 0; kinds && kinds[i]; i++) {
    if (kinds[i] != 'p' && kinds[i] != '0') continue;
    memcpy(&pointer, arguments[i], 8);
    struct object *found = memory(DEVICE_MEMORY, pointer, 1);
    CHECK(kinds[i] == '0' ? pointer == 0 : found != NULL, INVALID_VALUE);
    if (i == at) out = pointer;
    else if (found) for (size_t k = 0; k < found->size && k < 256; k++) sum = sum * 31 + (unsigned char)found->data[k];
  }
  if (size && !memory(DEVICE_MEMORY, out, size)) return pending = ILLEGAL_ADDRESS, OK;
  for (uint64_t k = 0; k < size; k++) ((unsigned char *)out)[k] = (unsigned char)(sum + k * 7 + k / 251);
  if (number("FAKE_CUDA_WRONG_AT") == launches && size) ((char *)out)[5] ^= 1;
  clock_ns += module->time_ns;
  return OK;
}
int cuLaunchKernel(void *handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  READY();
  struct object *function = find(FUNCTION, handle);
  CHECK(function && find(MODULE, function->module), INVALID_HANDLE);
  CHECK(!stream && !extra && arguments && gx && gy && gz && by && bz && bx * by * bz >= 32 && bx * by * bz <= 1024, INVALID_VALUE);
  CHECK((int)shared <= function->dynamic_limit && gy < 65536 && gz < 65536, INVALID_VALUE);
  CHECK(!function->module->is_text || gx * bx >= 64, INVALID_VALUE);
  launches++;
  if (number("FAKE_CUDA_EXIT_AT") == launches) _exit(41);
  if (number("FAKE_CUDA_FAIL_AT") == launches) { pending = ILLEGAL_ADDRESS; return OK; }
  return function->module->is_text ? run_text(function->module, arguments) : run_cubin(function->module, arguments);
}
int cuCtxSynchronize(void) { READY(); return waited(); }
int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
  READY(); CHECK(size > 0, INVALID_VALUE); CHECK(size < (size_t)1 << 33, OUT_OF_MEMORY);
  *pointer = (uint64_t)make(DEVICE_MEMORY, size)->data; return OK;
}
int cuMemFree_v2(uint64_t pointer) {
  READY();
  struct object *found = memory(DEVICE_MEMORY, pointer, 1);
  CHECK(found && (uint64_t)found->data == pointer, INVALID_VALUE);
  drop(found); return waited();
}
int cuMemAllocHost_v2(void **pointer, size_t size) { READY(); CHECK(size, INVALID_VALUE); *pointer = make(HOST_MEMORY, size)->data; return OK; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
  READY(); CHECK(memory(DEVICE_MEMORY, to, size) && from, INVALID_VALUE); memcpy((void *)to, from, size); return waited();
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
  READY(); CHECK(memory(DEVICE_MEMORY, from, size) && to, INVALID_VALUE); memcpy(to, (void *)from, size); return waited();
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
  READY(); CHECK(memory(DEVICE_MEMORY, from, size) && memory(DEVICE_MEMORY, to, size) && !stream, INVALID_VALUE);
  memcpy((void *)to, (void *)from, size); return OK;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
  READY(); CHECK(memory(DEVICE_MEMORY, from, size) && memory(HOST_MEMORY, (uint64_t)to, size) && !stream, INVALID_VALUE);
  memcpy(to, (void *)from, size); clock_ns += size / 50; return OK;
}
int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t size, void *stream) {
  READY(); CHECK(memory(DEVICE_MEMORY, to, size) && !stream, INVALID_VALUE);
  memset((void *)to, byte, size); clock_ns += 1000; return OK;
}
int cuEventCreate(void **event, unsigned flags) { READY(); CHECK(flags == 0, INVALID_VALUE); *event = make(EVENT, 0); return OK; }
int cuEventRecord(void *handle, void *stream) {
  READY();
  struct object *event = find(EVENT, handle);
  CHECK(event && !stream, INVALID_HANDLE);
  event->time_ns = clock_ns; event->recorded = 1; return OK;
}
int cuEventSynchronize(void *handle) { READY(); CHECK(find(EVENT, handle), INVALID_HANDLE); return waited(); }
int cuEventElapsedTime(float *ms, void *first, void *second) {
  READY();
  struct object *begin = find(EVENT, first), *end = find(EVENT, second);
  CHECK(begin && end && begin->recorded && end->recorded, INVALID_HANDLE);
  *ms = (float)((end->time_ns - begin->time_ns) / 1e6); return OK;
}
int cuGetErrorName(int status, const char **name) {
  *name = status == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : status == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE"
        : status == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : status == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
        : status == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : status == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
  return *name ? OK : 1;
}
