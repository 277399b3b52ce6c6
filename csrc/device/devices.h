// The devices of one model: one, or a device and the CPU beside it, and which layer is on which.
#pragma once

#include "device/backend.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

struct Split {
    int64_t first = 0; // layers before it stay on the CPU; the head counts as the layer after all
    int64_t first_experts = 0; // so do the experts of layers before this one

    bool is_whole() const { return first == 0 && first_experts == 0; }
};

class Devices {
  public:
    // measure, repack: as for Backend; the CPU beside a hypothetical GPU is not hypothetical.
    Devices(ggml_backend_dev_t device, const Split & split, int n_threads,
            const std::vector<std::string> & excluded, dfl_dry_run dry_run = DFL_DRY_RUN_NONE,
            bool repack = true);

    // The device of the head and of all layers that are not on the CPU; the CPU if it is the one.
    Backend & main() { return main_; }
    const Backend & main() const { return main_; }
    // The CPU beside another device, which also does what that device cannot; NULL without another.
    Backend * cpu() { return cpu_.get(); }
    const Backend * cpu() const { return cpu_.get(); }
    // The CPU, whichever it is.
    Backend & host() { return cpu_ ? *cpu_ : main_; }
    const Split & split() const { return split_; }

    Backend & of_layer(int64_t il) { return cpu_ && il < split_.first ? *cpu_ : main_; }
    uint64_t bytes_read() const;
    // By a tensor's name in the file.
    Backend & of_weight(const std::string & name);

  private:
    Split split_;
    Backend main_;
    std::unique_ptr<Backend> cpu_;
};

} // namespace dfl
