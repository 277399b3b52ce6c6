// Calls of CUDA's driver that the null GPU and the software GPU of tests/soft_gpu share. A file
// that includes this header first declares reserve(), map(), unmap() and fail().
#pragma once

#include "cuda_common.h"

#include <cuda.h>

#include <string>
#include <sys/mman.h>

EXPORT Counts * null_gpu_counts() {
    static Counts counts = {};
    return &counts;
}

EXPORT bool null_gpu_take(int64_t bytes) {
    Counts & counts = *null_gpu_counts();
    const int64_t used = counts.used_bytes += bytes;
    if (used > TOTAL_BYTES) {
        counts.used_bytes -= bytes;
        return false;
    }
    counts.allocations += bytes > 0;
    for (int64_t peak = counts.peak_bytes;
         used > peak && !counts.peak_bytes.compare_exchange_weak(peak, used);) {
    }
    return true;
}

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
    *text = "an error of a GPU in software";
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
    return null_gpu_take(static_cast<int64_t>(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle,
                         unsigned long long) {
    map(reinterpret_cast<void *>(at), bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    null_gpu_take(-static_cast<int64_t>(bytes));
    unmap(reinterpret_cast<void *>(at), bytes);
    return CUDA_SUCCESS;
}

// Frees nothing: ggml releases a handle as soon as it is mapped, and the mapping keeps the memory.
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}
