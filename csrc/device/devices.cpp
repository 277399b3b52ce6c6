#include "device/devices.h"

#include <cstdio>

namespace dfl {

Devices::Devices(ggml_backend_dev_t device, const Split & split, int n_threads,
                 const std::vector<std::string> & excluded, dfl_measure measure, bool repack)
    : split_(split), main_(device, n_threads, excluded, measure, repack) {
    if (device != cpu_device() || !split.is_whole()) {
        measure = measure == DFL_MEASURE_CUDA ? DFL_MEASURE_DEVICE : measure;
        cpu_ = std::make_unique<Backend>(cpu_device(), n_threads, excluded, measure, repack);
    }
}

uint64_t Devices::bytes_read() const {
    return main_.bytes_read() + (cpu_ ? cpu_->bytes_read() : 0);
}

Backend & Devices::of_weight(const std::string & name) {
    int il = 0;
    if (cpu_ == nullptr || std::sscanf(name.c_str(), "blk.%d.", &il) != 1) {
        return main_;
    }
    const bool is_expert = name.find("_exps.") != std::string::npos;
    return is_expert && il < split_.first_experts ? *cpu_ : of_layer(il);
}

} // namespace dfl
