#include "layers/common.h"

#include "layers/host/packed_gated.h"
#include "layers/host/packed_linear.h"
#include "layers/host/row_copies.h"

namespace dfl {

ggml_tensor * rms_norm(Build & b, ggml_tensor * x, ggml_tensor * weight) {
    return ggml_mul(b.ctx, ggml_rms_norm(b.ctx, x, b.hp.eps), weight);
}

ggml_tensor * linear(Build & b, const Linear & l, ggml_tensor * x) {
    ggml_tensor * y =
        l.packed != nullptr ? packed_linear(b, *l.packed, x) : ggml_mul_mat(b.ctx, l.weight, x);
    if (l.scale != nullptr) {
        y = ggml_mul(b.ctx, y, l.scale);
    }
    if (l.bias != nullptr) {
        y = ggml_add(b.ctx, y, l.bias);
    }
    return y;
}

std::vector<ggml_tensor *> linears(Build & b, const std::vector<const Linear *> & weights,
                                   ggml_tensor * x) {
    std::vector<const PackedMatrix *> packed;
    for (const Linear * l : weights) {
        if (l->packed != nullptr && l->scale == nullptr && l->bias == nullptr) {
            packed.push_back(l->packed);
        }
    }
    const std::vector<ggml_tensor *> joint = packed_linears(b, packed, x);
    std::vector<ggml_tensor *> found;
    size_t next = 0;
    for (const Linear * l : weights) {
        const bool joins = next < joint.size() && l->packed == packed[next] &&
                           l->scale == nullptr && l->bias == nullptr;
        found.push_back(joins ? joint[next++] : linear(b, *l, x));
    }
    return found;
}

static ggml_tensor * gated(Build & b, const FeedForwardWeights & w, ggml_tensor * gate,
                           ggml_tensor * up) {
    return w.gelu ? ggml_geglu_split(b.ctx, gate, up) : ggml_swiglu_split(b.ctx, gate, up);
}

ggml_tensor * feed_forward(Build & b, const FeedForwardWeights & w, ggml_tensor * x) {
    const auto plain = [](const Linear & l) {
        return l.packed != nullptr && l.scale == nullptr && l.bias == nullptr;
    };
    if (plain(w.gate) && plain(w.up) && plain(w.down) && !w.gelu &&
        gates_packed(b, *w.gate.packed, *w.up.packed)) {
        const PackedMatrix & down = *w.down.packed;
        return packed_linear(b, down, packed_gated(b, *w.gate.packed, *w.up.packed, down, x));
    }
    if (w.gate_up) {
        ggml_tensor * both = linear(b, w.gate_up, x);
        return linear(b, w.down, w.gelu ? ggml_geglu(b.ctx, both) : ggml_swiglu(b.ctx, both));
    }
    const std::vector<ggml_tensor *> both = linears(b, {&w.gate, &w.up}, x);
    return linear(b, w.down, gated(b, w, both[0], both[1]));
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
                y = pick_rows(b, y, b.in.out_rows);
                x = pick_rows(b, x, b.in.out_rows);
            }
        }
        x = add_residual(b, y, x);
        x = add_residual(b, ffn(b, il, rms_norm(b, x, layer.ffn_norm)), x);
    }
    ggml_tensor * logits = linear(b, b.weights.output, rms_norm(b, x, b.weights.output_norm));
    ggml_build_forward_expand(b.graph, logits);
    return logits;
}

} // namespace dfl
