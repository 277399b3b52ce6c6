// A C interface of the interpreter, for tests: PTX text in, arrays of the host as memory.
//
// Functions return 0, or 1 with a message in `error`.
#include "launch.h"
#include "module.h"

#include <algorithm>
#include <cstring>

using namespace soft_gpu;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t ERROR_BYTES = 512;

template <class Body>
int guard(char * error, Body && body) {
    try {
        body();
        return 0;
    } catch (const std::exception & failure) {
        std::strncpy(error, failure.what(), ERROR_BYTES - 1);
        error[ERROR_BYTES - 1] = '\0';
        return 1;
    }
}

} // namespace

EXPORT int soft_gpu_load(const char * ptx, Module ** module, char * error) {
    return guard(error, [&] { *module = new Module(ptx); });
}

EXPORT int soft_gpu_unknown(Module * module, char * text, size_t size, char * error) {
    return guard(error, [&] {
        std::strncpy(text, module->unknown_instructions().c_str(), size - 1);
        text[size - 1] = '\0';
    });
}

EXPORT void soft_gpu_free(Module * module) { delete module; }

// sizes: of the grid and the block, 3 each. arguments: values of all parameters, one after another.
EXPORT int soft_gpu_launch(Module * module, const char * name, const uint32_t * sizes,
                           uint32_t dynamic_bytes, int is_cooperative,
                           const void * const * arguments, size_t n_arguments, char * error) {
    return guard(error, [&] {
        Launch launch;
        launch.kernel = &module->kernel(name);
        std::copy_n(sizes, 3, launch.grid);
        std::copy_n(sizes + 3, 3, launch.block);
        launch.dynamic_bytes = dynamic_bytes;
        launch.is_cooperative = is_cooperative != 0;
        launch.parameters.resize(launch.kernel->parameter_bytes);
        require(n_arguments == launch.kernel->parameters.size(), "a wrong number of arguments");
        for (size_t i = 0; i < n_arguments; ++i) {
            const Parameter & parameter = launch.kernel->parameters[i];
            std::memcpy(&launch.parameters[parameter.offset], arguments[i], parameter.bytes);
        }
        run(launch);
    });
}

EXPORT void soft_gpu_set(int is_reversed, uint32_t n_threads, uint64_t max_jumps_back) {
    settings().is_reversed = is_reversed != 0;
    settings().n_threads = n_threads;
    settings().alone_us = 0; // small launches use all threads too
    settings().max_jumps_back = max_jumps_back;
}
