// Gate and up products of a feed-forward with packed weights, as one node.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "layers/cpu_ops/packed_input.h"

namespace dfl {

// Computes act(gate x) * up x, quantised for `down`, in steps of columns. One thread computes all
// of a step, so that its columns stay in the caches of one core.
class GatedSteps {
  public:
    GatedSteps(const Linear & gate, const Linear & up, const Linear & down, Activation activation);

    std::vector<const PackedMatrix *> weights() const { return {gate_.packed, up_.packed}; }
    int64_t n_steps() const { return (gate_.packed->n_out + step_ - 1) / step_; }
    int64_t row_size() const;
    // Returns the bytes of scratch that one thread needs for n_rows rows.
    int64_t scratch_size(int64_t n_rows) const;
    // Computes a step of act(gate x) * up x of an expert. x, to: n_rows quantised rows in and out.
    void run(int64_t step, int64_t expert, const char * x, int64_t n_rows, char * scratch,
             char * to) const;

  private:
    void multiply(const Linear & l, int64_t expert, const char * x, int64_t n_rows, int64_t first,
                  float * to) const;

    Linear gate_, up_;
    const cpu::PackedProduct & down_;
    Activation activation_;
    int64_t step_;
};

// True if packed_gated() serves w: on the CPU, packed, with gate and up taking x quantised alike.
bool gates_packed(const GraphContext & g, const FeedForwardWeights & w);

// Returns act(gate x) * up x, quantised for the product with w.down.
PackedInput packed_gated(GraphContext & g, const FeedForwardWeights & w, Activation activation,
                         const Rows & x);

} // namespace dfl
