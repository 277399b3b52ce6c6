#include "layers/decoder.h"

#include "layers/cpu_ops/capped.h"
#include "layers/cpu_ops/post_norm.h"
#include "layers/cpu_ops/row_copies.h"
#include "layers/linear.h"
#include "layers/moe.h"

namespace dfl {

SubLayer
mixer_sublayer(std::function<ggml_tensor *(Build & b, int il, const SubLayerInput & in)> build) {
    return {&LayerWeights::attn_norm, &LayerWeights::post_attn_norm, std::move(build)};
}

SubLayer feed_forward_sublayer() {
    return {&LayerWeights::ffn_norm, &LayerWeights::post_ffn_norm,
            [](Build & b, int il, const SubLayerInput & in) {
                const LayerWeights & layer = b.weights.layers[il];
                return layer.experts.router
                           ? mixture_of_experts(b, il, in.x, in.add)
                           : feed_forward(b, layer.ffn, b.hp.layers[il].activation, in.x, in.add);
            }};
}

ggml_tensor * rows_with_logits(Build & b, ggml_tensor * x) {
    return b.in.out_rows != nullptr ? pick_rows(b, x, b.in.out_rows) : x;
}

// scale: of what leaves it, or NULL.
static ggml_tensor * add_sublayer(Build & b, const SubLayer & sublayer, int il, ggml_tensor * x,
                                  ggml_tensor * scale) {
    const LayerWeights & layer = b.weights.layers[il];
    ggml_tensor * norm = sublayer.norm != nullptr ? layer.*sublayer.norm : nullptr;
    ggml_tensor * post_norm = layer.*sublayer.post_norm;
    const Rows rows = norm != nullptr ? normed(b, x, norm) : Rows(x);
    if (post_norm == nullptr) {
        ggml_tensor * y = sublayer.build(b, il, {rows, x, x});
        return scale != nullptr ? ggml_mul(b.ctx, y, scale) : y;
    }
    return post_normed(b, sublayer.build(b, il, {rows, x, nullptr}), post_norm, x, scale);
}

static ggml_tensor * build_head(Build & b, const Linear & head, ggml_tensor * x) {
    ggml_tensor * logits = linear(b, head, normed(b, x, b.weights.output_norm));
    if (b.hp.logit_scale != 1.0f) {
        logits = ggml_scale(b.ctx, logits, b.hp.logit_scale);
    }
    if (b.hp.logit_softcap > 0.0f) {
        logits = capped(b, logits, b.hp.logit_softcap);
    }
    ggml_build_forward_expand(b.graph, logits);
    return logits;
}

ggml_tensor * build_decoder(Build & b, const std::vector<SubLayer> & sublayers,
                            const Linear & head) {
    ggml_tensor * x = b.in.embd;
    const int n_layer = static_cast<int>(b.hp.n_layer());
    for (int il = 0; il < n_layer; ++il) {
        if (b.tap) {
            b.tap(il, x);
        }
        for (size_t i = 0; i < sublayers.size(); ++i) {
            const bool last = i + 1 == sublayers.size();
            x = add_sublayer(b, sublayers[i], il, x,
                             last ? b.weights.layers[il].output_scale : nullptr);
            if (i == 0 && il == n_layer - 1) {
                if (b.shape.n_out == 0) {
                    return nullptr; // the cache writes are in the graph; nobody reads the rest
                }
                x = rows_with_logits(b, x); // what follows sees only its own row
            }
        }
    }
    return build_head(b, head, x);
}

} // namespace dfl
