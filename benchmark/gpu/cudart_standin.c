/* Stands in for libcudart.so under FlashInfer's planners, which run on the host alone: it reports an
 * H200 and copies in host memory. What would start a kernel fails, and so does a question that it
 * has no answer to. Compiled by `planners.py`. Numbers are those of CUDA 13's driver_types.h.
 */
#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100 };

/* Of the card that is reported; tests set them. */
int standin_multiprocessors = 132;
int standin_blocks_per_multiprocessor = 4; /* of any kernel: occupancy is not modeled */

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  if (device != 0) return INVALID_VALUE;
  switch (attribute) {
    case 16: *value = standin_multiprocessors; return SUCCESS;
    case 39: *value = 2048; return SUCCESS;   /* threads a multiprocessor */
    case 75: *value = 9; return SUCCESS;      /* compute capability, major */
    case 76: *value = 0; return SUCCESS;      /* and minor */
    case 81: *value = 233472; return SUCCESS; /* bytes of shared memory a multiprocessor */
    case 97: *value = 232448; return SUCCESS; /* and a block, when it asks for them */
    default: return INVALID_VALUE;
  }
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                           int threads, size_t shared_bytes,
                                                           unsigned flags) {
  (void)kernel, (void)threads, (void)shared_bytes, (void)flags;
  *blocks = standin_blocks_per_multiprocessor;
  return SUCCESS;
}

int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return device == 0 ? SUCCESS : INVALID_VALUE; }

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  (void)kind, (void)stream;
  memcpy(to, from, bytes);
  return SUCCESS;
}

const char *cudaGetErrorName(int error) {
  return error == NO_DEVICE ? "cudaErrorNoDevice" : "cudaErrorInvalidValue";
}

const char *cudaGetErrorString(int error) {
  return error == NO_DEVICE ? "the stand-in for libcudart runs no kernels"
                            : "the stand-in for libcudart has no answer to this";
}

int cudaGetLastError(void) { return SUCCESS; }

/* Kernels: registered when a library is loaded, never run. */
void **__cudaRegisterFatBinary(void *image) {
  static void *handle;
  handle = image;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int is_external,
                       size_t bytes, int is_constant, int is_global) {
  (void)handle, (void)host, (void)device, (void)name;
  (void)is_external, (void)bytes, (void)is_constant, (void)is_global;
}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *thread, void *block, void *block_dim,
                            void *grid_dim, int *warp_size) {
  (void)handle, (void)host, (void)device, (void)name, (void)threads;
  (void)thread, (void)block, (void)block_dim, (void)grid_dim, (void)warp_size;
}

int __cudaPopCallConfiguration(void) { return NO_DEVICE; }
int __cudaGetKernel(void) { return NO_DEVICE; }
int __cudaLaunchKernel(void) { return NO_DEVICE; }
int cudaLaunchKernel(void) { return NO_DEVICE; }
int cudaLaunchKernelExC(void) { return NO_DEVICE; }
int cudaFuncSetAttribute(void) { return NO_DEVICE; }
