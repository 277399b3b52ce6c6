// Devices of a model: one device, or a device and the CPU, and the device of each layer.
#pragma once

#include "device/backend.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

struct Split {
    int64_t first = 0;         // first layer that is not on the CPU; the head is layer n_layer
    int64_t first_experts = 0; // first layer whose experts are not on the CPU

    static constexpr int64_t ALL = INT64_MAX; // as `first`: everything is on the CPU

    bool is_whole() const { return first == 0 && first_experts == 0; }
};

// True if a tensor of this name has weights of a layer's experts, the shared one excepted.
bool is_expert(const std::string & name);

class Devices {
  public:
    // dry_run: memory is counted, not allocated; a hypothetical GPU has the real CPU beside it.
    // repack: weights may be rearranged for CPU kernels.
    Devices(ggml_backend_dev_t device, const Split & split, int n_threads,
            const std::vector<std::string> & excluded, dfl_dry_run dry_run = DFL_DRY_RUN_NONE,
            bool repack = true);

    // Returns the device of the head and of all layers that are not split off to the CPU.
    Backend & main() { return main_; }
    const Backend & main() const { return main_; }
    // Returns the CPU, which runs what the main device cannot; NULL if the CPU is the main device.
    Backend * cpu() { return cpu_.get(); }
    const Backend * cpu() const { return cpu_.get(); }
    // Returns the CPU, whether or not it is the main device.
    Backend & host() { return cpu_ ? *cpu_ : main_; }
    const Split & split() const { return split_; }

    Backend & of_layer(int64_t il) { return cpu_ && il < split_.first ? *cpu_ : main_; }
    uint64_t bytes_read() const;
    // Returns the device of a weight by the name of its tensor.
    Backend & of_weight(const std::string & name);

  private:
    Split split_;
    Backend main_;
    std::unique_ptr<Backend> cpu_;
};

} // namespace dfl
