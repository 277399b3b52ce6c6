// Graph pieces every architecture uses.
#pragma once

#include "layers/host/build.h"

#include <functional>

namespace dfl {

// x: [n, ...]; weight: [n].
ggml_tensor * rms_norm(Build & b, ggml_tensor * x, ggml_tensor * weight);

// weight: [n_in, n_out], x: [n_in, n_rows] -> [n_out, n_rows].
ggml_tensor * linear(Build & b, const Linear & l, ggml_tensor * x);

// The same for several weights and one x. Where one node computes some of them, their rows do not
// follow each other without a gap.
std::vector<ggml_tensor *> linears(Build & b, const std::vector<const Linear *> & weights,
                                   ggml_tensor * x);

// x: [n_embd, n_rows] -> same: down(silu(gate x) * up x).
ggml_tensor * feed_forward(Build & b, const FeedForwardWeights & w, ggml_tensor * x);

// One half of a layer: the normed input [n_embd, n_rows] to what is added to the residual stream.
using SubLayer = std::function<ggml_tensor *(Build & b, int il, ggml_tensor * x)>;

// The pre-norm decoder: embeddings, per layer x += attention(norm x), x += ffn(norm x), final norm,
// head. Returns logits [n_vocab, n_out], or NULL when no row wants any.
ggml_tensor * build_decoder(Build & b, const SubLayer & attention, const SubLayer & ffn);

} // namespace dfl
