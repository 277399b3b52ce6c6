// Inputs of graphs on a device: written on the host, side by side, and copied in one piece. A copy
// of its own for each would cost the round more than all that is computed on the host.
#pragma once

#include "device/backend.h"

#include <cstddef>
#include <cstdint>
#include <ggml-cpp.h>

namespace dfl {

class InputBlock {
  public:
    explicit InputBlock(Backend & backend) : backend_(backend) {}

    // Gives memory to all inputs that a graph's nodes read: bytes of them. They lie where those of
    // every other graph do, so all inputs are written before each run. Throws DFL_STATUS_MEMORY.
    size_t place(ggml_cgraph * graph);
    // How often the block moved, which voids the graphs placed before.
    int64_t n_moves() const { return n_moves_; }
    uint64_t bytes() const { return memory_.bytes; }

    // Where the host writes an input that was placed.
    void * host(const ggml_tensor * input) const;
    // Copies the first bytes to the device, before what is handed to it next.
    void upload(size_t bytes);

  private:
    void grow(size_t bytes);

    Backend & backend_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    ggml_tensor * block_ = nullptr; // i8 [bytes]
    ggml_backend_buffer_ptr host_;  // pinned where the device has such memory
    int64_t n_moves_ = 0;
};

} // namespace dfl
