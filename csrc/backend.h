// ggml devices: list them, load modules, choose one, report memory.
#pragma once

#include "dflash.h"

#include <string>

namespace dfl {

// Version of ggml this library was compiled against.
const char * ggml_build_version();

void load_backend_module(const std::string & path);
int32_t device_count();
dfl_device_info device_info(int32_t index);

} // namespace dfl
