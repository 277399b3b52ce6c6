// Functions of the C ABI for devices and quantisation.
#include "api/handles.h"

#include "cpu/isa/kernels.h"
#include "device/backend.h"
#include "model/quantize.h"

#include <ggml.h>

using dfl::guard;
using dfl::need;

int32_t dfl_abi_version(void) { return DFL_ABI_VERSION; }

const char * dfl_ggml_version(void) { return ggml_version(); }

const char * dfl_ggml_build_version(void) { return dfl::ggml_build_version(); }

dfl_status dfl_backend_load(const char * path, dfl_error * err) {
    return guard(err, [&] {
        need(path);
        dfl::load_backend_module(path);
    });
}

int32_t dfl_device_count(void) { return dfl::device_count(); }

dfl_status dfl_device_get(int32_t index, dfl_device_info * info, dfl_error * err) {
    return guard(err, [&] {
        need(info);
        *info = dfl::device_info(index);
    });
}

static void write_names(const std::vector<std::string> & list, char * names, uint64_t size) {
    need(names);
    std::string joined;
    for (const std::string & name : list) {
        joined += (joined.empty() ? "" : ",") + name;
    }
    DFL_CHECK(joined.size() < size, DFL_STATUS_ARGUMENT,
              "the names take %zu bytes, the given buffer has only %llu", joined.size(),
              (unsigned long long)size);
    std::snprintf(names, size, "%s", joined.c_str());
}

dfl_status dfl_extra_buffer_types(char * names, uint64_t size, dfl_error * err) {
    return guard(err, [&] { write_names(dfl::extra_buffer_types(), names, size); });
}

dfl_status dfl_cpu_kernel_sets(char * names, uint64_t size, dfl_error * err) {
    return guard(err, [&] { write_names(dfl::cpu::kernel_set_names(), names, size); });
}

dfl_status dfl_probe_buffer_type(const char * name, dfl_error * err) {
    return guard(err, [&] {
        need(name);
        dfl::probe_buffer_type(name);
    });
}

dfl_status dfl_quantize_row_size(const char * type, int64_t n_per_row, uint64_t * size,
                                 dfl_error * err) {
    return guard(err, [&] {
        need(type, size);
        *size = dfl::quantized_row_size(type, n_per_row);
    });
}

dfl_status dfl_quantize(const char * type, const float * src, int64_t n_rows, int64_t n_per_row,
                        void * dst, uint64_t dst_size, int32_t n_threads, dfl_error * err) {
    return guard(err, [&] {
        need(type, src, dst);
        dfl::quantize(type, src, n_rows, n_per_row, dst, dst_size, n_threads);
    });
}
