#include "layers/decoder.h"

#include "layers/cpu_ops/capped.h"
#include "layers/cpu_ops/post_norm.h"
#include "layers/cpu_ops/row_copies.h"
#include "layers/linear.h"
#include "layers/moe.h"

namespace dfl {

SubLayer mixer_sublayer(
    std::function<ggml_tensor *(GraphContext & g, int il, const SubLayerInput & in)> build) {
    return {&LayerWeights::attn_norm, &LayerWeights::post_attn_norm, std::move(build)};
}

SubLayer feed_forward_sublayer() {
    return {&LayerWeights::ffn_norm, &LayerWeights::post_ffn_norm,
            [](GraphContext & g, int il, const SubLayerInput & in) {
                const LayerWeights & layer = g.weights.layers[il];
                return layer.experts.router
                           ? mixture_of_experts(g, il, in.x, in.x, in.add)
                           : feed_forward(g, layer.ffn, g.hp.layers[il].activation, in.x, in.add);
            }};
}

ggml_tensor * rows_with_logits(GraphContext & g, ggml_tensor * x) {
    return g.in.out_rows != nullptr && !g.taps_output ? gather_rows(g, x, g.in.out_rows) : x;
}

// Adds one sublayer of layer il to the graph. scale: factor of the layer's output, or NULL.
static ggml_tensor * add_sublayer(GraphContext & g, const SubLayer & sublayer, int il,
                                  ggml_tensor * x, ggml_tensor * scale) {
    const LayerWeights & layer = g.weights.layers[il];
    ggml_tensor * norm = sublayer.norm != nullptr ? layer.*sublayer.norm : nullptr;
    ggml_tensor * post_norm = layer.*sublayer.post_norm;
    const Rows rows = norm != nullptr ? normed(g, x, norm) : Rows(x);
    if (post_norm == nullptr) {
        ggml_tensor * y = sublayer.build(g, il, {rows, x, x});
        return scale != nullptr ? ggml_mul(g.ctx, y, scale) : y;
    }
    return post_normed(g, sublayer.build(g, il, {rows, x, nullptr}), post_norm, x, scale);
}

static ggml_tensor * build_head(GraphContext & g, const Linear & head, ggml_tensor * x) {
    ggml_tensor * logits = linear(g, head, normed(g, x, g.weights.output_norm));
    if (g.hp.logit_scale != 1.0f) {
        logits = ggml_scale(g.ctx, logits, g.hp.logit_scale);
    }
    if (g.hp.logit_softcap > 0.0f) {
        logits = capped(g, logits, g.hp.logit_softcap);
    }
    ggml_build_forward_expand(g.graph, logits);
    return logits;
}

ggml_tensor * build_decoder(GraphContext & g, const std::vector<SubLayer> & sublayers,
                            const Linear & head) {
    ggml_tensor * x = g.in.embd;
    const int n_layer = static_cast<int>(g.hp.n_layer());
    for (int il = 0; il < n_layer; ++il) {
        if (g.tap) {
            g.tap(il, x);
        }
        for (size_t i = 0; i < sublayers.size(); ++i) {
            const bool last = i + 1 == sublayers.size();
            x = add_sublayer(g, sublayers[i], il, x,
                             last ? g.weights.layers[il].output_scale : nullptr);
            if (i == 0 && il == n_layer - 1) {
                if (g.shape.n_out == 0 && !g.taps_output) {
                    return nullptr; // no row gets logits: later sublayers are not needed
                }
                x = rows_with_logits(g, x); // rows without logits are not needed by later sublayers
            }
        }
    }
    if (g.taps_output) {
        g.tap(n_layer, x);
        g.tap(n_layer + 1, tensor_of(g, normed(g, x, g.weights.output_norm)));
        if (g.shape.n_out == 0) {
            return nullptr;
        }
        g.taps_output = false;
        x = rows_with_logits(g, x);
    }
    return build_head(g, head, x);
}

} // namespace dfl
