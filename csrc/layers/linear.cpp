#include "layers/linear.h"

#include "layers/cpu_ops/packed_gated.h"
#include "layers/cpu_ops/packed_linear.h"

namespace dfl {

ggml_tensor * rms_norm(GraphContext & g, ggml_tensor * x, ggml_tensor * weight) {
    return ggml_mul(g.ctx, ggml_rms_norm(g.ctx, x, g.hp.eps), weight);
}

ggml_tensor * plus(GraphContext & g, ggml_tensor * y, ggml_tensor * add) {
    return add != nullptr ? ggml_add(g.ctx, y, add) : y;
}

ggml_tensor * linear(GraphContext & g, const Linear & l, const Rows & x, ggml_tensor * add) {
    if (l.packed != nullptr) {
        return packed_linear(g, l, x, add);
    }
    ggml_tensor * y = ggml_mul_mat(g.ctx, l.weight, tensor_of(g, x));
    if (l.scale != nullptr) {
        y = ggml_mul(g.ctx, y, l.scale);
    }
    return plus(g, plus(g, y, l.bias), add);
}

static bool take_alike(const Linear & one, const Linear & other) {
    return one.packed != nullptr && other.packed != nullptr &&
           one.packed->product->quantize_row == other.packed->product->quantize_row;
}

std::vector<ggml_tensor *> linears(GraphContext & g, const std::vector<const Linear *> & weights,
                                   const Rows & x) {
    std::vector<ggml_tensor *> outputs(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
        if (outputs[i] != nullptr) {
            continue;
        }
        std::vector<size_t> places;
        std::vector<const Linear *> alike;
        for (size_t j = i; j < weights.size(); ++j) {
            if (take_alike(*weights[i], *weights[j])) {
                places.push_back(j);
                alike.push_back(weights[j]);
            }
        }
        if (alike.size() < 2) {
            outputs[i] = linear(g, *weights[i], x);
            continue;
        }
        const std::vector<ggml_tensor *> joint = packed_linears(g, alike, x);
        for (size_t j = 0; j < places.size(); ++j) {
            outputs[places[j]] = joint[j];
        }
    }
    return outputs;
}

ggml_tensor * gated(GraphContext & g, Activation activation, ggml_tensor * gate, ggml_tensor * up) {
    switch (activation) {
    case Activation::GELU:
        return ggml_geglu_split(g.ctx, gate, up);
    case Activation::CLAMPED_SILU:
        return ggml_swiglu_oai(g.ctx, gate, up, GATE_SHARPNESS, GATE_LIMIT);
    case Activation::SILU:
        break;
    }
    return ggml_swiglu_split(g.ctx, gate, up);
}

ggml_tensor * gated(GraphContext & g, Activation activation, ggml_tensor * both) {
    const int64_t n = both->ne[0] / 2;
    const auto half = [&](int64_t first) {
        return ggml_view_3d(g.ctx, both, n, both->ne[1], both->ne[2], both->nb[1], both->nb[2],
                            first * ggml_element_size(both));
    };
    switch (activation) {
    case Activation::GELU:
        return ggml_geglu(g.ctx, both);
    case Activation::CLAMPED_SILU:
        return gated(g, activation, half(0), half(n));
    case Activation::SILU:
        break;
    }
    return ggml_swiglu(g.ctx, both);
}

ggml_tensor * feed_forward(GraphContext & g, const FeedForwardWeights & w, Activation activation,
                           const Rows & x, ggml_tensor * add) {
    if (gates_packed(g, w)) {
        return packed_linear(g, w.down, packed_gated(g, w, activation, x), add);
    }
    if (w.gate_up) {
        return linear(g, w.down, gated(g, activation, linear(g, w.gate_up, x)), add);
    }
    const std::vector<ggml_tensor *> both = linears(g, {&w.gate, &w.up}, x);
    return linear(g, w.down, gated(g, activation, both[0], both[1]), add);
}

} // namespace dfl
