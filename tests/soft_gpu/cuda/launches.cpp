// libcudart.so: registration of modules and kernels, and their launches.
//
// SOFT_GPU_TRACE: prints each kernel that runs.
#include "../launch.h"
#include "../module.h"
#include "api.h"
#include "streams.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

using namespace soft_gpu;

namespace {

struct Function {
    Module * module;
    std::string name;
    int max_dynamic_bytes = 48 << 10;
};

// Kernels by the address of their host function. Never destroyed: modules unregister at exit.
std::map<const void *, Function> & functions() {
    static auto * all = new std::map<const void *, Function>;
    return *all;
}

Function & function_of(const void * host_function) {
    const auto found = functions().find(host_function);
    require(found != functions().end(), "a kernel is launched that was not registered");
    return found->second;
}

void trace(const Launch & launch) {
    static const bool is_traced = std::getenv("SOFT_GPU_TRACE") != nullptr;
    if (is_traced) {
        std::fprintf(stderr, "%s grid %u %u %u block %u %u %u shared %u\n",
                     launch.kernel->name.c_str(), launch.grid[0], launch.grid[1], launch.grid[2],
                     launch.block[0], launch.block[1], launch.block[2], launch.dynamic_bytes);
    }
}

} // namespace

cudaError_t soft_gpu::launch(const void * host_function, const Configuration & size,
                             void ** arguments, bool is_cooperative) {
    return loudly([&] {
        const Function & function = function_of(host_function);
        require(size.shared <= static_cast<size_t>(function.max_dynamic_bytes),
                function.name + ": " + std::to_string(size.shared) + " bytes of shared memory, " +
                    std::to_string(function.max_dynamic_bytes) + " are allowed");
        auto made = std::make_shared<Launch>();
        made->kernel = &function.module->kernel(function.name);
        const dim3 sizes[] = {size.grid, size.block};
        u32 * fields[] = {made->grid, made->block};
        for (int i = 0; i < 2; ++i) {
            fields[i][0] = sizes[i].x;
            fields[i][1] = sizes[i].y;
            fields[i][2] = sizes[i].z;
        }
        made->dynamic_bytes = static_cast<u32>(size.shared);
        made->is_cooperative = is_cooperative;
        made->parameters.resize(made->kernel->parameter_bytes);
        for (size_t i = 0; i < made->kernel->parameters.size(); ++i) {
            const Parameter & parameter = made->kernel->parameters[i];
            std::memcpy(&made->parameters[parameter.offset], arguments[i], parameter.bytes);
        }
        ++(is_capturing(size.stream) ? counts().captured_kernels : counts().kernels);
        enqueue(size.stream, {"kernel " + function.name, [made] {
                                  trace(*made);
                                  run(*made);
                              }});
        return cudaSuccess;
    });
}

EXPORT void ** __cudaRegisterFatBinary(void * binary) {
    return loudly([&] {
        // Never freed: launches may outlive the registration.
        return reinterpret_cast<void **>(new Module(ptx_of_fat_binary(binary)));
    });
}

EXPORT void __cudaRegisterFunction(void ** module, const char * host_function, char *,
                                   const char * name, int, uint3 *, uint3 *, dim3 *, dim3 *,
                                   int *) {
    functions()[host_function] = {reinterpret_cast<Module *>(module), name};
}

EXPORT cudaError_t cudaFuncSetAttribute(const void * host_function, cudaFuncAttribute attribute,
                                        int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > static_cast<int>(MAX_SHARED_BYTES)) {
            return cudaErrorInvalidValue;
        }
        loudly([&] { return function_of(host_function).max_dynamic_bytes = value; });
    }
    return cudaSuccess;
}

// Lists the unknown instructions of all registered modules. Returns the length of the list.
EXPORT int soft_gpu_unknown_instructions(char * text, int size) {
    return loudly([&] {
        std::set<Module *> modules;
        for (const auto & entry : functions()) {
            modules.insert(entry.second.module);
        }
        std::string all;
        for (Module * module : modules) {
            all += module->unknown_instructions();
        }
        return std::snprintf(text, size, "%s", all.c_str());
    });
}
