// Devices of ggml: loading backend modules, listing and finding devices.
#pragma once

#include "dflash.h"

#include <ggml-backend.h>
#include <string>

namespace dfl {

// Returns the version of ggml that this library was compiled against.
const char * ggml_build_version();

void load_backend_module(const std::string & path);
int32_t device_count();
dfl_device_info device_info(int32_t index);

ggml_backend_dev_t cpu_device();
// Returns the device of a name, ignoring case; for "" the first GPU, else the CPU. Throws
// DFL_STATUS_UNSUPPORTED, listing the devices.
ggml_backend_dev_t find_device(const std::string & name);
uint64_t free_bytes(ggml_backend_dev_t device);

// Returns the number of fast physical cores that this process may use.
int default_threads();

} // namespace dfl
