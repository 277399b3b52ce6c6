#include "device/devices.h"

#include <climits>

namespace dfl {

Devices::Devices(ggml_backend_dev_t device, const Split & split, int n_threads,
                 const std::vector<std::string> & excluded, dfl_dry_run dry_run, bool repack)
    : split_(split), main_(device, n_threads, excluded, dry_run, repack) {
    if (device != cpu_device() || dry_run == DFL_DRY_RUN_CUDA) {
        dry_run = dry_run == DFL_DRY_RUN_CUDA ? DFL_DRY_RUN_DEVICE : dry_run;
        cpu_ = std::make_unique<Backend>(cpu_device(), n_threads, excluded, dry_run, repack);
    }
}

uint64_t Devices::bytes_read() const {
    return main_.bytes_read() + (cpu_ ? cpu_->bytes_read() : 0);
}

bool is_expert(const std::string & name) { return name.find("_exps.") != std::string::npos; }

Backend & Devices::of_weight(const std::string & name) {
    int il = INT_MAX; // weights of no layer are where the head is
    std::sscanf(name.c_str(), "blk.%d.", &il);
    return cpu_ && is_expert(name) && il < split_.first_experts ? *cpu_ : of_layer(il);
}

} // namespace dfl
