#include "layers/common.h"

namespace dfl {

ggml_tensor * rms_norm(Build & b, ggml_tensor * x, ggml_tensor * weight) {
    return ggml_mul(b.ctx, ggml_rms_norm(b.ctx, x, b.hp.eps), weight);
}

ggml_tensor * linear(Build & b, const Linear & l, ggml_tensor * x) {
    ggml_tensor * y = ggml_mul_mat(b.ctx, l.weight, x);
    if (l.scale != nullptr) {
        y = ggml_mul(b.ctx, y, l.scale);
    }
    if (l.bias != nullptr) {
        y = ggml_add(b.ctx, y, l.bias);
    }
    return y;
}

ggml_tensor * feed_forward(Build & b, const FeedForwardWeights & w, ggml_tensor * x) {
    if (w.gate_up) {
        ggml_tensor * both = linear(b, w.gate_up, x);
        return linear(b, w.down, w.gelu ? ggml_geglu(b.ctx, both) : ggml_swiglu(b.ctx, both));
    }
    ggml_tensor * up = linear(b, w.up, x);
    ggml_tensor * gate = linear(b, w.gate, x);
    return linear(b, w.down,
                  w.gelu ? ggml_geglu_split(b.ctx, gate, up) : ggml_swiglu_split(b.ctx, gate, up));
}

ggml_tensor * build_decoder(Build & b, const SubLayer & attention, const SubLayer & ffn) {
    ggml_tensor * x = b.in.embd;
    const int n_layer = static_cast<int>(b.hp.n_layer());
    for (int il = 0; il < n_layer; ++il) {
        const LayerWeights & layer = b.weights.layers[il];
        if (b.tap) {
            b.tap(il, x);
        }
        ggml_tensor * y = attention(b, il, rms_norm(b, x, layer.attn_norm));
        if (il == n_layer - 1) {
            if (b.shape.n_out == 0) {
                return nullptr; // the cache writes are in the graph; nobody reads the rest
            }
            if (b.in.out_rows != nullptr) {
                y = ggml_get_rows(b.ctx, y, b.in.out_rows);
                x = ggml_get_rows(b.ctx, x, b.in.out_rows);
            }
        }
        x = ggml_add(b.ctx, y, x);
        x = ggml_add(b.ctx, ffn(b, il, rms_norm(b, x, layer.ffn_norm)), x);
    }
    ggml_tensor * logits = linear(b, b.weights.output, rms_norm(b, x, b.weights.output_norm));
    ggml_build_forward_expand(b.graph, logits);
    return logits;
}

} // namespace dfl
