/* Calls one compiled kernel from plain C, without Python, torch or TVM:
 *
 *     driver LAUNCHER.so KERNEL.so ENTRY CALL_FILE RESULT_FILE
 *
 * CALL_FILE (native byte order, written by c_call.py): int64 number of memory blocks, each int64
 * size and bytes; int64 number of pointers, each int64 block, offset, and the block and offset it
 * points to; int64 number of arguments, each int64 kind and
 *     INT      int64 value
 *     FLOAT    double value
 *     ADDRESS  int64 block, offset
 *     TENSOR   int64 block, offset, dtype code, bits, rank; int64 shape[rank], strides[rank]
 * RESULT_FILE: the bytes of all blocks after the call. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#define MAX_ITEMS 64
#define MAX_RANK 8
enum { INT, FLOAT, ADDRESS, TENSOR };

void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_max_threads(void);
int omp_in_parallel(void);

/* The one function of tvm-ffi that kernels and launcher need. Kernels look it up by name. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int32_t i = 0; i < count; i++) fputs(parts[i], stderr);
  fputc('\n', stderr);
}

static void raise_error(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &message, 1);
}

static void fail(const char *what) {
  fprintf(stderr, "driver: %s\n", what);
  exit(2);
}

static void read_all(void *to, size_t size, FILE *file) {
  if (size && fread(to, size, 1, file) != 1) fail("call file is too short");
}

static int64_t read_int(FILE *file) {
  int64_t value;
  read_all(&value, sizeof value, file);
  return value;
}

static int64_t read_count(FILE *file) {
  int64_t count = read_int(file);
  if (count < 0 || count > MAX_ITEMS) fail("too many items");
  return count;
}

static char *blocks[MAX_ITEMS];
static int64_t sizes[MAX_ITEMS];
static int64_t num_blocks;

static char *read_place(FILE *file) {
  int64_t block = read_int(file), offset = read_int(file);
  if (block < 0 || block >= num_blocks || offset < 0 || offset > sizes[block]) fail("bad place");
  return blocks[block] + offset;
}

static void read_blocks(FILE *file) {
  num_blocks = read_count(file);
  for (int64_t i = 0; i < num_blocks; i++) {
    sizes[i] = read_int(file);
    /* Not the 64-byte alignment that kernels could wrongly rely on: elements' own is enough. */
    char *memory = malloc(sizes[i] + 64 + 8);
    if (!memory) fail("no memory");
    blocks[i] = memory + (64 - (uintptr_t)memory % 64) % 64 + 8;
    read_all(blocks[i], sizes[i], file);
  }
  for (int64_t count = read_int(file); count > 0; count--) {
    char *where = read_place(file), *target = read_place(file);
    int64_t address = (int64_t)(intptr_t)target;
    memcpy(where, &address, sizeof address);
  }
}

static DLTensor tensors[MAX_ITEMS];
static int64_t dims[MAX_ITEMS][2][MAX_RANK];

static TVMFFIAny read_argument(FILE *file, int index) {
  TVMFFIAny any;
  memset(&any, 0, sizeof any);
  int64_t kind = read_int(file);
  if (kind == FLOAT) {
    any.type_index = kTVMFFIFloat;
    read_all(&any.v_float64, sizeof any.v_float64, file);
  } else if (kind == TENSOR) {
    DLTensor *tensor = &tensors[index];
    tensor->data = read_place(file);
    tensor->device.device_type = kDLCPU;
    tensor->dtype.code = (uint8_t)read_int(file);
    tensor->dtype.bits = (uint8_t)read_int(file);
    tensor->dtype.lanes = 1;
    tensor->ndim = (int32_t)read_int(file);
    if (tensor->ndim > MAX_RANK) fail("rank too high");
    tensor->shape = dims[index][0];
    tensor->strides = dims[index][1];
    read_all(tensor->shape, tensor->ndim * sizeof(int64_t), file);
    read_all(tensor->strides, tensor->ndim * sizeof(int64_t), file);
    any.type_index = kTVMFFIDLTensorPtr;
    any.v_ptr = tensor;
  } else {
    any.type_index = kTVMFFIInt;
    any.v_int64 = kind == ADDRESS ? (int64_t)(intptr_t)read_place(file) : read_int(file);
  }
  return any;
}

static void *open_library(const char *path) {
  void *library = dlopen(path, RTLD_NOW);
  if (!library) fail(dlerror());
  return library;
}

static void *find(void *library, const char *name) {
  void *symbol = dlsym(library, name);
  if (!symbol) fail(dlerror());
  return symbol;
}

/* Variables of a kernel's library that its loader sets; a kernel without scratch has fewer. */
static void set_variable(void *library, const char *name, void *value) {
  void **variable = dlsym(library, name);
  if (variable) *variable = value;
}

int main(int argc, char **argv) {
  if (argc != 6) fail("usage: driver LAUNCHER.so KERNEL.so ENTRY CALL_FILE RESULT_FILE");
  void *launcher = open_library(argv[1]), *library = open_library(argv[2]);
  void (*bind)(void *, void *, void *, void *) = find(launcher, "tvm_ops_bind");
  bind(GOMP_parallel, omp_get_max_threads, omp_in_parallel, raise_error);
  set_variable(library, "__TVMBackendParallelLaunch", find(launcher, "tvm_ops_parallel_launch"));
  set_variable(library, "__TVMBackendAllocWorkspace", find(launcher, "tvm_ops_alloc"));
  set_variable(library, "__TVMBackendFreeWorkspace", find(launcher, "tvm_ops_free"));
  TVMFFISafeCallType entry = find(library, argv[3]);

  FILE *file = fopen(argv[4], "rb");
  if (!file) fail("call file can't be opened");
  read_blocks(file);
  int32_t count = (int32_t)read_count(file);
  TVMFFIAny arguments[MAX_ITEMS], result;
  for (int32_t i = 0; i < count; i++) arguments[i] = read_argument(file, i);
  fclose(file);
  memset(&result, 0, sizeof result);
  if (entry(NULL, arguments, count, &result) != 0) return 1;

  file = fopen(argv[5], "wb");
  if (!file) fail("result file can't be opened");
  for (int64_t i = 0; i < num_blocks; i++) {
    if (sizes[i] && fwrite(blocks[i], sizes[i], 1, file) != 1) fail("result can't be written");
  }
  return fclose(file) ? 2 : 0;
}
