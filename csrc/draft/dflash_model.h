// The DFlash drafter: a few layers that attend to the target's hidden states and to a block of
// masks.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "model/weights.h"

#include <string>
#include <vector>

namespace dfl {

struct DraftHparams {
    Hparams hp;
    // A tap is the residual stream that enters this target layer, that is, the output of the layer
    // before it: Hugging Face's target_layer_ids + 1.
    std::vector<int64_t> target_layers;
    int64_t block_size = 16;
    int32_t mask_token = -1;

    int64_t n_features() const { return hp.n_embd * (int64_t)target_layers.size(); }
};

bool is_drafter(const GgufFile & file);
// n_target_layers: for older files, whose tap ids follow from it.
DraftHparams read_draft_hparams(const GgufFile & file, int64_t n_target_layers);
void bind_drafter(WeightLoader & loader, const DraftHparams & draft);

// Projects features [n_features, n] into the drafter's K/V cells.
// positions: i32 [n] or [4 * n]; cells: i64 [n].
void build_injection(GraphContext & g, ggml_tensor * features, ggml_tensor * positions,
                     ggml_tensor * cells);
// The block [last token, mask, ...] of b.shape.n_rows rows over the drafter's cells; returns the
// logits [n_vocab, n_rows - 1] of what follows each row but the last. head: [n_embd, n_vocab].
ggml_tensor * build_block(GraphContext & g, const Linear & head);

} // namespace dfl
