#include "device/registry.h"

#include "device/host.h"
#include "device/log_capture.h"
#include "device/zero_pages.h"
#include "error.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <sys/stat.h>
#include <thread>
#include <vector>

#ifdef __linux__
#include <dlfcn.h>
#include <sched.h>
#endif

namespace dfl {

const char * ggml_build_version() { return DFL_GGML_BUILD_VERSION; }

// Returns why the system cannot load a library, or "".
static std::string missing_library(const std::string & path) {
#ifdef __linux__
    void * handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char * reason = dlerror();
        return reason != nullptr ? reason : "";
    }
    dlclose(handle);
#else
    (void)path;
#endif
    return "";
}

void load_backend_module(const std::string & path) {
    struct stat st;
    DFL_CHECK(stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode), DFL_STATUS_FILE,
              "backend module %s: no such file", path.c_str());
    LogCapture quiet; // hides the log lines in which a backend lists its devices
    if (ggml_backend_load(path.c_str()) == nullptr) {
        const std::string reason = missing_library(path);
        throw Error(DFL_STATUS_FILE, format("backend module %s: not a ggml backend of ggml %s "
                                            "(make one with dflash-backend build)%s%s",
                                            path.c_str(), ggml_build_version(),
                                            reason.empty() ? "" : ": ", reason.c_str()));
    }
}

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

static bool same_name(const std::string & a, const char * b) {
    return a.size() == std::strlen(b) &&
           std::equal(a.begin(), a.end(), b, [](unsigned char x, unsigned char y) {
               return std::tolower(x) == std::tolower(y);
           });
}

ggml_backend_dev_t find_device(const std::string & name) {
    if (name.empty()) {
        for (auto type : {GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU}) {
            if (ggml_backend_dev_t device = ggml_backend_dev_by_type(type)) {
                return device;
            }
        }
        return cpu_device();
    }
    std::string names;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (same_name(name, ggml_backend_dev_name(device))) {
            return device;
        }
        names += (names.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device));
    }
    throw Error(DFL_STATUS_UNSUPPORTED,
                format("device %s: ggml has no such device, only %s; a backend module may bring it",
                       name.c_str(), names.c_str()));
}

int32_t device_count() { return static_cast<int32_t>(ggml_backend_dev_count()); }

// Returns free host memory, with reclaimable page cache, but without memory that a container may
// not use, or that caches have reserved and not yet written to.
static uint64_t available_host_memory(uint64_t fallback) {
    const uint64_t available = available_memory().value_or(fallback);
    return available - std::min(available, untouched_bytes());
}

dfl_device_info device_info(int32_t index) {
    DFL_CHECK(index >= 0 && index < device_count(), DFL_STATUS_ARGUMENT,
              "device index %d is out of range, there are %d devices", index, device_count());
    ggml_backend_dev_t dev = ggml_backend_dev_get(index);
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);

    dfl_device_info info = {};
    std::snprintf(info.name, sizeof info.name, "%s", props.name);
    std::snprintf(info.description, sizeof info.description, "%s", props.description);
    info.free_bytes = props.memory_free;
    info.total_bytes = props.memory_total;
    switch (props.type) {
    case GGML_BACKEND_DEVICE_TYPE_CPU:
        info.type = DFL_DEVICE_CPU;
        info.free_bytes = available_host_memory(info.free_bytes);
        break;
    case GGML_BACKEND_DEVICE_TYPE_GPU:
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        info.type = DFL_DEVICE_GPU;
        break;
    default:
        info.type = DFL_DEVICE_OTHER;
    }
    return info;
}

uint64_t free_bytes(ggml_backend_dev_t device) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    return device == cpu_device() ? available_host_memory(free) : free;
}

int default_threads() {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        std::vector<int> cpus;
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &allowed)) {
                cpus.push_back(cpu);
            }
        }
        return usable_cores(cpus);
    }
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

} // namespace dfl
