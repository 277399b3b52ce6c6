// ggml's devices: load modules that bring some, list them, find one.
#pragma once

#include "dflash.h"

#include <ggml-backend.h>
#include <string>

namespace dfl {

// Version of ggml this library was compiled against.
const char * ggml_build_version();

void load_backend_module(const std::string & path);
int32_t device_count();
dfl_device_info device_info(int32_t index);

ggml_backend_dev_t cpu_device();
// The device of this name, in any case; an empty name: the first GPU, the CPU where there is none.
// Throws DFL_STATUS_UNSUPPORTED listing the devices.
ggml_backend_dev_t find_device(const std::string & name);
// Bytes that can still be allocated.
uint64_t free_bytes(ggml_backend_dev_t device);

// Threads worth computing with: fast physical cores this process may use.
int default_threads();

} // namespace dfl
