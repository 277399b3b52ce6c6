// Inputs of graphs on a device: adjacent on the host, and copied to the device at once. Copies of
// single inputs would take longer than all other host work of a round.
#pragma once

#include "device/backend.h"

#include <cstddef>
#include <cstdint>
#include <ggml-cpp.h>

namespace dfl {

class InputBlock {
  public:
    explicit InputBlock(Backend & backend) : backend_(backend) {}

    // Places the inputs that a graph reads, and returns their bytes. All graphs share the memory,
    // so inputs must be written before each run. Throws DFL_STATUS_MEMORY.
    size_t place(ggml_cgraph * graph);
    // Returns how often the block was replaced, which invalidates graphs placed before.
    int64_t n_moves() const { return n_moves_; }
    uint64_t bytes() const { return memory_.bytes; }

    // Returns the host memory to write a placed input to.
    void * host(const ggml_tensor * input) const;
    // Starts copying the first `bytes` bytes to the device, whose later work waits for the copy.
    void upload(size_t bytes);

  private:
    void grow(size_t bytes);

    Backend & backend_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    ggml_tensor * block_ = nullptr; // inputs of all graphs on the device, i8 [bytes]
    ggml_backend_buffer_ptr host_; // host copy of the block, pinned if the device has pinned memory
    int64_t n_moves_ = 0;
};

} // namespace dfl
