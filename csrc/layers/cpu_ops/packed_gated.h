// The gated half of a feed-forward with packed weights, as one node.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "layers/cpu_ops/packed_input.h"

namespace dfl {

// act(gate x) * up x, quantised for `down`, a step of columns at a time: a thread's columns of both
// meet where they were computed, and no other reads them before they are quantised.
class GatedSteps {
  public:
    GatedSteps(const Linear & gate, const Linear & up, const Linear & down, Activation activation);

    std::vector<const PackedMatrix *> weights() const { return {gate_.packed, up_.packed}; }
    int64_t n_steps() const { return (gate_.packed->n_out + step_ - 1) / step_; }
    // Bytes of a quantised row.
    int64_t row_size() const;
    // Bytes of a thread for so many rows.
    int64_t scratch_size(int64_t n_rows) const;
    // One step of one expert. x: quantised rows; to: the first of as many quantised rows.
    void run(int64_t step, int64_t expert, const char * x, int64_t n_rows, char * scratch,
             char * to) const;

  private:
    void multiply(const Linear & l, int64_t expert, const char * x, int64_t n_rows, int64_t first,
                  float * to) const;

    Linear gate_, up_;
    const cpu::PackedProduct & down_;
    Activation activation_;
    int64_t step_; // columns
};

// Whether packed_gated() serves these weights: on the CPU, with x quantised alike.
bool gates_packed(const GraphContext & g, const FeedForwardWeights & w);

// act(gate x) * up x, quantised for `down`.
PackedInput packed_gated(GraphContext & g, const FeedForwardWeights & w, Activation activation,
                         const Rows & x);

} // namespace dfl
