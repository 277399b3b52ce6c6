// Inputs and small results of graphs on a device: adjacent, so that all inputs go to the device in
// one copy and all results come back in one. Single copies would take longer than all other host
// work of a round.
#pragma once

#include "device/backend.h"

#include <cstddef>
#include <cstdint>
#include <ggml-cpp.h>
#include <vector>

namespace dfl {

// Bytes of a graph's inputs, from the start of the block on, and of its results behind them.
struct IoBytes {
    size_t inputs = 0, results = 0;
};

class IoBlock {
  public:
    explicit IoBlock(Backend & backend) : backend_(backend) {}

    // Places the inputs that a graph reads and the given results. All graphs share the memory, so
    // inputs must be written before each run. Throws DFL_STATUS_MEMORY.
    IoBytes place(ggml_cgraph * graph, const std::vector<ggml_tensor *> & results);
    // Returns how often the block was replaced, which invalidates graphs placed before.
    int64_t n_moves() const { return n_moves_; }
    uint64_t bytes() const { return memory_.bytes; }

    // Returns the host copy of a placed tensor.
    void * host(const ggml_tensor * tensor) const;
    // Start copying inputs to the device, in front of its later work, or results to the host,
    // behind its earlier work.
    void upload(const IoBytes & bytes);
    void download(const IoBytes & bytes);

  private:
    void grow(size_t bytes);

    Backend & backend_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    ggml_tensor * block_ = nullptr; // inputs and results on the device, i8 [bytes]
    ggml_backend_buffer_ptr host_; // host copy of the block, pinned if the device has pinned memory
    int64_t n_moves_ = 0;
};

} // namespace dfl
