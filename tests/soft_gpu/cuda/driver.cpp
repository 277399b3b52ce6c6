// libcuda.so.1: the calls of the driver that ggml makes itself, for virtual memory.
#include "../block.h"
#include "api.h"
#include "device_memory.h"
#include "streams.h"

#include <cuda.h>

#include <sys/mman.h>

using namespace soft_gpu;

EXPORT Counts * null_gpu_counts() { return &counts(); }

EXPORT int64_t null_gpu_total_bytes() { return TOTAL_BYTES; }

EXPORT CUresult cuDeviceGet(CUdevice * device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int * value, CUdevice_attribute attribute, CUdevice) {
    if (attribute != CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        fail("the driver is asked for attribute " + std::to_string(attribute));
    }
    *value = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult, const char ** text) {
    *text = "an error of the software GPU";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t * bytes, const CUmemAllocationProp *,
                                              CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr * at, size_t bytes, size_t, CUdeviceptr,
                                    unsigned long long) {
    void * reserved = reserve(bytes);
    *at = reinterpret_cast<CUdeviceptr>(reserved);
    return reserved == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    munmap(reinterpret_cast<void *>(at), bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle * handle, size_t bytes,
                            const CUmemAllocationProp *, unsigned long long) {
    *handle = bytes;
    return take(static_cast<int64_t>(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle,
                         unsigned long long) {
    map(reinterpret_cast<void *>(at), bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    synchronize_all();
    take(-static_cast<int64_t>(bytes));
    unmap(reinterpret_cast<void *>(at), bytes);
    return CUDA_SUCCESS;
}

// Frees nothing: ggml releases a handle as soon as it is mapped, and the mapping keeps the memory.
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}
