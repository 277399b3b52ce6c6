/* The C ABI of dflash-gguf. cffi reads this file as it is, so no macro stands in a declaration.
 *
 * Every fallible call returns a dfl_status and takes a dfl_error * (may be NULL) as its last
 * argument: the message is one sentence that names the thing, the value and the limit.
 */
#ifndef DFLASH_H
#define DFLASH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

enum { DFL_ABI_VERSION = 1 };

typedef enum {
    DFL_STATUS_OK = 0,
    DFL_STATUS_ARGUMENT = 1,    /* a bad argument of this call */
    DFL_STATUS_FILE = 2,        /* a missing, truncated, damaged or foreign file */
    DFL_STATUS_UNSUPPORTED = 3, /* well-formed, but not something this build or device can run */
    DFL_STATUS_MEMORY = 4,      /* not enough host or device memory; the sentence names the bytes */
    DFL_STATUS_COMPUTE = 5,     /* the device failed while computing */
    DFL_STATUS_CANCELLED = 6,   /* stopped because the caller asked for it; state is unchanged */
    DFL_STATUS_INTERNAL = 7     /* a defect of this library */
} dfl_status;

typedef struct {
    int32_t code;
    char message[512];
} dfl_error;

/* ---- versions and devices ---- */

int32_t dfl_abi_version(void);

/* Version of the ggml library in this process, and of the one this library was built with. */
const char * dfl_ggml_version(void);
const char * dfl_ggml_build_version(void);

typedef enum { DFL_DEVICE_CPU = 0, DFL_DEVICE_GPU = 1, DFL_DEVICE_OTHER = 2 } dfl_device_type;

typedef struct {
    char name[64];
    char description[128];
    int32_t type; /* dfl_device_type */
    uint64_t free_bytes;
    uint64_t total_bytes;
} dfl_device_info;

/* Loads a ggml backend module (a libggml-*.so); its devices join the list below. */
dfl_status dfl_backend_load(const char * path, dfl_error * err);
int32_t dfl_device_count(void);
dfl_status dfl_device_get(int32_t index, dfl_device_info * info, dfl_error * err);

/* ---- quantisation ---- */

/* Bytes of one row of n_per_row values in the named ggml type ("q8_0", "q4_K", "f16"...).
 * Errors: DFL_STATUS_ARGUMENT (unknown type, n_per_row not a multiple of the type's block). */
dfl_status dfl_quantize_row_size(const char * type, int64_t n_per_row, uint64_t * size,
                                 dfl_error * err);

/* Quantises n_rows rows of n_per_row float32 values with ggml's reference quantiser.
 * src: [n_rows][n_per_row]; dst: n_rows * row size bytes. n_threads <= 0: one per core.
 * Errors: DFL_STATUS_ARGUMENT (as above; dst_size too small; type needs an importance matrix). */
dfl_status dfl_quantize(const char * type, const float * src, int64_t n_rows, int64_t n_per_row,
                        void * dst, uint64_t dst_size, int32_t n_threads, dfl_error * err);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
