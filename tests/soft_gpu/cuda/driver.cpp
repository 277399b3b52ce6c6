// libcuda.so.1: the calls of the driver that ggml makes itself, for virtual memory.
#include "api.h"
#include "device_memory.h"

using namespace soft_gpu;

#include "cuda_driver_calls.h"
