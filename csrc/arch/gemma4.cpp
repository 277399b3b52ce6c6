// Gemma 4: sliding and full layers differ in heads and rope; norms around sublayers, normed values,
// capped logits, experts beside dense feed-forwards. Small models also share K/V between layers and
// have per-layer embeddings.
#include "arch/arch.h"
#include "error.h"
#include "gguf_schema.h"
#include "layers/attention.h"
#include "layers/cpu_ops/post_norm.h"
#include "layers/linear.h"
#include "layers/moe.h"

#include <cmath>

namespace dfl {

// Logit soft cap, and rope base of sliding-window layers, for files without these metadata keys.
static constexpr float DEFAULT_SOFTCAP = 30.0f;
static constexpr float DEFAULT_SLIDING_FREQ_BASE = 10000.0f;

// Makes the last layers read the keys and values of the last earlier layer of their kind (sliding
// or full). Source: transformers, models/gemma4, Gemma4TextAttention.
static void share_keys_and_values(const GgufFile & file, Hparams & hp) {
    const char * key = schema::KEY_ATTENTION_SHARED_KV_LAYERS;
    const int64_t n = file.has(key) ? file.need_integer(key, 0, hp.n_layer() - 1) : 0;
    const int64_t first = hp.n_layer() - n;
    for (int64_t il = first; il < hp.n_layer(); ++il) {
        LayerShape & layer = hp.layers[il];
        for (int64_t before = 0; before < first; ++before) {
            const bool alike = (hp.layers[before].window > 0) == (layer.window > 0);
            layer.kv_layer = alike ? before : layer.kv_layer;
        }
        DFL_CHECK(layer.kv_layer >= 0 && hp.layers[layer.kv_layer].n_head_kv == layer.n_head_kv,
                  DFL_STATUS_FILE,
                  "%s: metadata key %s is %lld, but layer %lld has no earlier layer of its kind to "
                  "share keys and values with",
                  file.path().c_str(), file.key(key).c_str(), (long long)n, (long long)il);
    }
}

static Hparams read(const GgufFile & file) {
    Hparams hp = read_common_hparams(file, {GGML_ROPE_TYPE_NEOX, {}, /*sliding_period =*/0});
    hp.embedding_scale = std::sqrt(static_cast<float>(hp.n_embd));
    hp.logit_softcap = DEFAULT_SOFTCAP;
    read_scales(file, hp);
    if (file.integer(schema::KEY_EXPERT_COUNT).value_or(0) != 0) {
        hp.experts = read_expert_shape(file, /*shared =*/false);
        hp.experts.activation = Activation::GELU;
    }
    share_keys_and_values(file, hp);
    constexpr int64_t max_layers = 1 << 16;
    const char * per_layer = schema::KEY_EMBEDDING_LENGTH_PER_LAYER_INPUT;
    hp.n_per_layer = file.has(per_layer) ? file.need_integer(per_layer, 0, max_layers) : 0;
    for (LayerShape & layer : hp.layers) {
        const bool slides = layer.window > 0;
        layer.attn_scale = 1.0f;
        layer.norms_values = true;
        layer.value_is_key = true; // layers without V weights take the K projection as V
        layer.activation = Activation::GELU;
        layer.rope.takes_factors = !slides;
        if (slides && !file.has(schema::KEY_ROPE_FREQ_BASE_SWA)) {
            layer.rope.freq_base = DEFAULT_SLIDING_FREQ_BASE;
        }
    }
    return hp;
}

static void bind_feed_forwards(WeightLoader & loader, int il) {
    const Hparams & hp = loader.hparams();
    LayerWeights & layer = loader.weights().layers[il];
    loader.feed_forward(il);
    if (hp.experts.n_expert == 0) {
        return;
    }
    // The file's router scale applies to the router's input, which is also divided by sqrt(n_embd).
    // `plain` keeps the loader from applying this scale to the router's output.
    layer.experts.router = loader.linear(schema::TENSOR_FFN_GATE_INP, il, hp.n_embd,
                                         hp.experts.n_expert, /*plain =*/true);
    const float factor = 1.0f / std::sqrt(static_cast<float>(hp.n_embd));
    layer.parallel_norms.router =
        loader.scaled_vector(schema::TENSOR_FFN_GATE_INP_SCALE, il, hp.n_embd, factor);
    loader.experts(il);
    layer.parallel_norms.experts = loader.vector(schema::TENSOR_PRE_FFW_NORM_2, il, hp.n_embd);
    layer.parallel_norms.post_dense = loader.vector(schema::TENSOR_POST_FFW_NORM_1, il, hp.n_embd);
    layer.parallel_norms.post_experts =
        loader.vector(schema::TENSOR_POST_FFW_NORM_2, il, hp.n_embd);
}

static void bind_layer_attention(WeightLoader & loader, int il) {
    const Hparams & hp = loader.hparams();
    const LayerShape & shape = hp.layers[il];
    AttentionWeights & attn = loader.weights().layers[il].attn;
    const int64_t q_width = shape.head_dim * shape.n_head;
    attn.q_norm = loader.vector(schema::TENSOR_ATTN_Q_NORM, il, shape.head_dim);
    if (shape.kv_layer < 0) {
        loader.attention(il, q_width);
        attn.k_norm = loader.vector(schema::TENSOR_ATTN_K_NORM, il, shape.head_dim);
        return;
    }
    attn.q = loader.linear(schema::TENSOR_ATTN_Q, il, hp.n_embd, q_width);
    attn.output = loader.linear(schema::TENSOR_ATTN_OUTPUT, il, q_width, hp.n_embd);
    for (const char * unused :
         {schema::TENSOR_ATTN_K, schema::TENSOR_ATTN_V, schema::TENSOR_ATTN_K_NORM}) {
        loader.ignore(unused, il);
    }
}

static void bind(WeightLoader & loader) {
    const Hparams & hp = loader.hparams();
    loader.shared_tensors();
    if (hp.n_per_layer > 0) {
        loader.per_layer_inputs();
    }
    BlockOptions options;
    options.post_attn_norm = options.post_ffn_norm = true;
    options.bind_mixer = bind_layer_attention;
    options.bind_feed_forward = bind_feed_forwards;
    for (int il = 0; il < hp.n_layer(); ++il) {
        options.output_scale = loader.has(schema::TENSOR_LAYER_OUTPUT_SCALE, il);
        bind_transformer_block(loader, il, options);
    }
}

// Builds the dense feed-forward and any experts beside it, each with norms before and after.
static ggml_tensor * feed_forwards(GraphContext & g, int il, const SubLayerInput & in) {
    const LayerWeights & layer = g.weights.layers[il];
    const Activation activation = g.hp.layers[il].activation;
    if (!layer.experts.router) {
        return feed_forward(g, layer.ffn, activation, in.x, in.add);
    }
    ggml_tensor * dense = feed_forward(g, layer.ffn, activation, in.x, nullptr);
    ggml_tensor * experts =
        mixture_of_experts(g, il, normed(g, in.stream, layer.parallel_norms.router),
                           normed(g, in.stream, layer.parallel_norms.experts), nullptr);
    ggml_tensor * both = post_normed(g, dense, layer.parallel_norms.post_dense, in.add);
    return post_normed(g, experts, layer.parallel_norms.post_experts, both);
}

// Returns the per-layer inputs of all layers, [n_per_layer, n_layer, n_rows]: the sum of per-layer
// embeddings and a normed projection of the token embeddings, divided by sqrt(2).
static ggml_tensor * per_layer_inputs(GraphContext & g) {
    const int64_t n = g.hp.n_per_layer;
    const auto heads = [&](ggml_tensor * x) {
        return ggml_reshape_3d(g.ctx, x, n, g.hp.n_layer(), x->ne[1]);
    };
    // The reference divides the projection by sqrt(n_embd) before the norm. Multiplying the norm's
    // eps by n_embd has the same effect.
    ggml_tensor * projected = heads(linear(g, g.weights.per_layer_projection, g.in.embd));
    projected = ggml_rms_norm(g.ctx, projected, g.hp.eps * static_cast<float>(g.hp.n_embd));
    projected = ggml_mul(g.ctx, projected, g.weights.per_layer_projection_norm);
    return ggml_scale(g.ctx, ggml_add(g.ctx, projected, heads(g.in.per_layer)), std::sqrt(0.5f));
}

static ggml_tensor * take_of_token(GraphContext & g, int il, const Rows & x, ggml_tensor * inputs) {
    const PerLayerWeights & w = g.weights.layers[il].per_layer;
    ggml_tensor * input = ggml_view_2d(g.ctx, inputs, inputs->ne[0], inputs->ne[2], inputs->nb[2],
                                       il * inputs->nb[1]);
    if (il == g.hp.n_layer() - 1) {
        input = rows_with_logits(g, input);
    }
    ggml_tensor * inner = gated(g, Activation::GELU, linear(g, w.gate, x), input);
    return linear(g, w.projection, inner);
}

static ggml_tensor * build(GraphContext & g) {
    std::vector<SubLayer> sublayers = {
        mixer_sublayer(self_attention),
        {&LayerWeights::ffn_norm, &LayerWeights::post_ffn_norm, feed_forwards}};
    if (g.hp.n_per_layer > 0) {
        ggml_tensor * inputs = per_layer_inputs(g);
        sublayers.push_back({nullptr, &LayerWeights::per_layer_norm,
                             [inputs](GraphContext & g, int il, const SubLayerInput & in) {
                                 return take_of_token(g, il, in.x, inputs);
                             }});
    }
    return build_decoder(g, sublayers, g.weights.output);
}

extern const Arch GEMMA4 = {schema::ARCH_GEMMA4, read, bind, build};

} // namespace dfl
