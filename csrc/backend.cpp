#include "backend.h"

#include "error.h"

#include <ggml-backend.h>
#include <sys/stat.h>

namespace dfl {

const char * ggml_build_version() { return DFL_GGML_BUILD_VERSION; }

void load_backend_module(const std::string & path) {
    struct stat st;
    DFL_CHECK(stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode), DFL_STATUS_FILE,
              "backend module %s: no such file", path.c_str());
    DFL_CHECK(ggml_backend_load(path.c_str()) != nullptr, DFL_STATUS_FILE,
              "backend module %s: not a ggml backend of ggml %s, or one of its libraries is missing",
              path.c_str(), ggml_build_version());
}

int32_t device_count() { return static_cast<int32_t>(ggml_backend_dev_count()); }

dfl_device_info device_info(int32_t index) {
    DFL_CHECK(index >= 0 && index < device_count(), DFL_STATUS_ARGUMENT,
              "device index %d: there are %d devices", index, device_count());
    ggml_backend_dev_t dev = ggml_backend_dev_get(index);
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);

    dfl_device_info info = {};
    std::snprintf(info.name, sizeof info.name, "%s", props.name);
    std::snprintf(info.description, sizeof info.description, "%s", props.description);
    switch (props.type) {
    case GGML_BACKEND_DEVICE_TYPE_CPU:
        info.type = DFL_DEVICE_CPU;
        break;
    case GGML_BACKEND_DEVICE_TYPE_GPU:
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        info.type = DFL_DEVICE_GPU;
        break;
    default:
        info.type = DFL_DEVICE_OTHER;
    }
    info.free_bytes = props.memory_free;
    info.total_bytes = props.memory_total;
    return info;
}

} // namespace dfl
