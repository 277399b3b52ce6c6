// Gemma 4: sliding and full layers with heads and rope of their own, norms before and after each
// sublayer, values that are normed, scaled embeddings, capped logits; experts beside a dense
// feed-forward.
#include "arch/arch.h"
#include "error.h"
#include "gguf_schema.h"
#include "layers/attention.h"
#include "layers/linear.h"
#include "layers/moe.h"

#include <cmath>

namespace dfl {

// What files mean that do not say.
static constexpr float DEFAULT_SOFTCAP = 30.0f;
static constexpr float DEFAULT_SLIDING_FREQ_BASE = 10000.0f;

// Sizes that a file may give and this core has nothing for.
static void refuse_unless_zero(const GgufFile & file, const char * key, const char * what) {
    const int64_t n = file.integer(key).value_or(0);
    DFL_CHECK(n == 0, DFL_STATUS_UNSUPPORTED, "%s: metadata key %s is %lld: Gemma 4 models %s",
              file.path().c_str(), file.key(key).c_str(), (long long)n, what);
}

static Hparams read(const GgufFile & file) {
    refuse_unless_zero(file, schema::KEY_EMBEDDING_LENGTH_PER_LAYER_INPUT,
                       "with per-layer inputs (E2B, E4B) cannot be run yet");
    refuse_unless_zero(file, schema::KEY_ATTENTION_SHARED_KV_LAYERS,
                       "whose layers share keys and values (E2B, E4B) cannot be run yet");
    Hparams hp = read_common_hparams(file, {GGML_ROPE_TYPE_NEOX, {}, /*sliding_period =*/0});
    hp.embedding_scale = std::sqrt(static_cast<float>(hp.n_embd));
    hp.logit_softcap = DEFAULT_SOFTCAP;
    read_scales(file, hp);
    if (file.integer(schema::KEY_EXPERT_COUNT).value_or(0) != 0) {
        hp.experts = read_expert_shape(file, /*shared =*/false);
        hp.experts.activation = Activation::GELU;
    }
    for (LayerShape & layer : hp.layers) {
        const bool slides = layer.window > 0;
        layer.attn_scale = 1.0f;
        layer.norms_values = true;
        layer.value_is_key = true; // where there is no projection of V
        layer.activation = Activation::GELU;
        layer.rope.takes_factors = !slides;
        if (slides && !file.has(schema::KEY_ROPE_FREQ_BASE_SWA)) {
            layer.rope.freq_base = DEFAULT_SLIDING_FREQ_BASE;
        }
    }
    return hp;
}

static void bind_experts(WeightLoader & loader, int il) {
    const Hparams & hp = loader.hparams();
    LayerWeights & layer = loader.weights().layers[il];
    // Here its scale is one of what it reads, which is also divided by the root of the width.
    layer.experts.router = loader.linear(schema::TENSOR_FFN_GATE_INP, il, hp.n_embd,
                                         hp.experts.n_expert, /*plain =*/true);
    const float factor = 1.0f / std::sqrt(static_cast<float>(hp.n_embd));
    layer.beside.router =
        loader.scaled_vector(schema::TENSOR_FFN_GATE_INP_SCALE, il, hp.n_embd, factor);
    loader.experts(il);
    layer.beside.experts = loader.vector(schema::TENSOR_PRE_FFW_NORM_2, il, hp.n_embd);
    layer.beside.post_dense = loader.vector(schema::TENSOR_POST_FFW_NORM_1, il, hp.n_embd);
    layer.beside.post_experts = loader.vector(schema::TENSOR_POST_FFW_NORM_2, il, hp.n_embd);
}

static void bind(WeightLoader & loader) {
    const Hparams & hp = loader.hparams();
    loader.shared_tensors();
    for (int il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & shape = hp.layers[il];
        LayerWeights & layer = loader.weights().layers[il];
        layer.attn_norm = loader.vector(schema::TENSOR_ATTN_NORM, il, hp.n_embd);
        loader.attention(il, shape.head_dim * shape.n_head);
        layer.attn.q_norm = loader.vector(schema::TENSOR_ATTN_Q_NORM, il, shape.head_dim);
        layer.attn.k_norm = loader.vector(schema::TENSOR_ATTN_K_NORM, il, shape.head_dim);
        layer.post_attn_norm = loader.vector(schema::TENSOR_POST_ATTENTION_NORM, il, hp.n_embd);
        layer.ffn_norm = loader.vector(schema::TENSOR_FFN_NORM, il, hp.n_embd);
        loader.feed_forward(il);
        if (hp.experts.n_expert > 0) {
            bind_experts(loader, il);
        }
        layer.post_ffn_norm = loader.vector(schema::TENSOR_POST_FFW_NORM, il, hp.n_embd);
        layer.output_scale = loader.maybe_vector(schema::TENSOR_LAYER_OUTPUT_SCALE, il, 1);
    }
}

// The dense part and, where a model has them, experts, each with a norm of its own before and
// after.
static ggml_tensor * feed_forwards(Build & b, int il, const SubLayerInput & in) {
    const LayerWeights & layer = b.weights.layers[il];
    const Activation activation = b.hp.layers[il].activation;
    if (!layer.experts.router) {
        return feed_forward(b, layer.ffn, activation, in.x, in.add);
    }
    ggml_tensor * dense = feed_forward(b, layer.ffn, activation, in.x, nullptr);
    ggml_tensor * experts = mixture_of_experts(b, il, normed(b, in.stream, layer.beside.router),
                                               normed(b, in.stream, layer.beside.experts), nullptr);
    ggml_tensor * both = ggml_add(b.ctx, rms_norm(b, dense, layer.beside.post_dense),
                                  rms_norm(b, experts, layer.beside.post_experts));
    return plus(b, both, in.add);
}

static ggml_tensor * build(Build & b) {
    const SubLayer feed_forward = {&LayerWeights::ffn_norm, &LayerWeights::post_ffn_norm,
                                   feed_forwards};
    return build_decoder(b, {mixer_sublayer(self_attention), feed_forward}, b.weights.output);
}

extern const Arch GEMMA4 = {schema::ARCH_GEMMA4, read, bind, build};

} // namespace dfl
